# SPDX-License-Identifier: Apache-2.0
"""The engram's hash against the golden rows, an independent implementation in Python integers, and its 32-bit form."""

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_deepseek_v41.config import ModelConfig, load_config
from modeling_deepseek_v41.engram.hashing import (
    EngramLayout,
    engram_layouts,
    engram_primes,
    lookback,
    row_ids,
    row_ids_limbs,
)
from modeling_deepseek_v41.engram.token_map import token_map
from modeling_deepseek_v41.errors import ConfigError

DATA = Path(__file__).resolve().parents[1] / "data"
TINY = DATA / "golden" / "tiny_a"
GOLDEN = json.loads((TINY / "golden.json").read_text(encoding="utf-8"))["engram"]
PROMPTS = ("p1", "p5", "p17", "p40", "p100")
RowsOf = Callable[[torch.Tensor, EngramLayout], torch.Tensor]
FORMS = pytest.mark.parametrize("rows_of", [row_ids, row_ids_limbs])


@functools.cache
def tiny_config() -> ModelConfig:
    return load_config(TINY / "ckpt")


@functools.cache
def release_config() -> ModelConfig:
    return load_config(DATA / "release_config.json")


@functools.cache
def tiny_map() -> torch.Tensor:
    return token_map(TINY / "ckpt", tiny_config())


@functools.cache
def golden() -> dict[str, torch.Tensor]:
    return load_file(TINY / "golden_f32.safetensors")


def engram_config(
    layers: tuple[int, ...], n: int, heads: int, vocab: int, compressed: int, sums: tuple[int, ...] | None = None
) -> ModelConfig:
    """tiny_a with another engram; the table sizes follow by rule unless ``sums`` gives them."""
    config = dataclasses.replace(
        tiny_config(), engram_layer_ids=layers, engram_num_embeddings=(0,) * len(layers), engram_max_ngram_size=n,
        engram_n_heads=heads, engram_vocab_size=vocab, engram_compressed_vocab_size=compressed,
    )  # fmt: skip
    sums = sums or tuple(sum(primes) for primes in engram_primes(config))
    return dataclasses.replace(config, engram_num_embeddings=sums)


def with_start(tokens: torch.Tensor, alive: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepends the n-1 positions that do not exist; their ids are wrong on purpose, so that nothing may read them."""
    before = torch.full((tokens.shape[0], n - 1), 7, dtype=tokens.dtype)
    return torch.cat([before, tokens], dim=1), torch.cat([torch.zeros_like(before, dtype=torch.bool), alive], dim=1)


def is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def plain_rows(config: ModelConfig, tokens: list[int], alive: list[bool], pad: int) -> list[list[list[int]]]:
    """[engram layer][position][column] in Python integers, one sequence from its start; prime by prime, slot by slot."""
    used: set[int] = set()
    result = []
    for layer in config.engram_layer_ids:
        primes = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            candidate = config.engram_vocab_size
            for _ in range(config.engram_n_heads):
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
        positions = []
        for p in range(len(tokens)):
            value, rows, reaches = 0, [], True
            for t in range(config.engram_max_ngram_size):
                reaches = reaches and p - t >= 0 and alive[p - t]
                token = tokens[p - t] if reaches else pad
                value ^= token * (2 * int(drawn[t]) + 1)
                for head in range(config.engram_n_heads if t else 0):
                    column = (t - 1) * config.engram_n_heads + head
                    rows.append(sum(primes[:column]) + value % primes[column])
            positions.append(rows)
        result.append(positions)
    return result


class Exact32(TorchDispatchMode):
    """Fails on any tensor that is not int32, on divisions, and where an int32 result differs from the same in int64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert "div" not in str(func), func
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            assert tensor.dtype == torch.int32, func
        arithmetic = (torch.ops.aten.mul, torch.ops.aten.add, torch.ops.aten.sub)
        assert "shift" not in str(func) or "rshift" in str(func), func
        if func.overloadpacket in arithmetic:
            wide = [arg.to(torch.int64) if isinstance(arg, torch.Tensor) else arg for arg in args]
            assert torch.equal(func(*wide), result.to(torch.int64)), func
            assert int(result.min()) >= 0
        return result


# Layouts


def test_golden_layouts() -> None:
    for i, layout in enumerate(engram_layouts(tiny_config())):
        assert layout.layer == tiny_config().engram_layer_ids[i]
        assert list(layout.multipliers) == GOLDEN["multipliers"][i]
        assert list(layout.primes) == [prime for size in GOLDEN["primes"][i] for prime in size]
        assert list(layout.offsets) == GOLDEN["offsets"][i]
        assert layout.rows == tiny_config().engram_num_embeddings[i]


def test_release_layouts() -> None:
    config = release_config()
    primes = engram_primes(config)
    assert [sum(layer) for layer in primes] == list(config.engram_num_embeddings) == [384_006_168, 384_016_682]
    flat = [prime for layer in primes for prime in layer]
    assert len(set(flat)) == 2 * 24 and flat == sorted(flat) and all(map(is_prime, flat))
    assert [prime for prime in range(16_000_000, flat[-1] + 1) if is_prime(prime)] == flat
    for layout in engram_layouts(config):
        assert len(layout.multipliers) == 4 and len(layout.primes) == len(layout.offsets) == config.engram_columns == 24
        assert all(multiplier % 2 == 1 for multiplier in layout.multipliers)
        assert max(layout.multipliers) * (config.engram_compressed_vocab_size - 1) < 2**63


def test_first_prime_may_be_engram_vocab_size_itself() -> None:
    assert engram_primes(engram_config((0,), n=2, heads=2, vocab=211, compressed=430)) == [[211, 223]]
    assert engram_primes(engram_config((0,), n=2, heads=2, vocab=1, compressed=430)) == [[2, 3]]


def test_primes_are_drawn_in_the_order_of_the_configuration() -> None:
    assert engram_primes(engram_config((5, 1), n=2, heads=2, vocab=10, compressed=430)) == [[11, 13], [17, 19]]


def test_layer_zero_draws_from_seed_zero() -> None:
    (layout,) = engram_layouts(engram_config((0,), n=3, heads=1, vocab=10, compressed=430))
    drawn = np.random.default_rng(0).integers(0, (2**63 - 1) // 430 // 2, size=3, dtype=np.int64)
    assert list(layout.multipliers) == [2 * int(value) + 1 for value in drawn]


def test_no_engram_layers() -> None:
    assert engram_layouts(dataclasses.replace(tiny_config(), engram_layer_ids=(), engram_num_embeddings=())) == ()


def test_wrong_table_size_is_refused() -> None:
    config = dataclasses.replace(tiny_config(), engram_num_embeddings=(1362, 1553), source="some/config.json")
    with pytest.raises(ConfigError, match=r"some/config\.json: engram_num_embeddings: layer 2 has 1553, expected 1552"):
        engram_layouts(config)


# Golden rows


@FORMS
@pytest.mark.parametrize("prompt", PROMPTS)
def test_golden_text(prompt: str, rows_of: RowsOf) -> None:
    ids = torch.cat([golden()[f"{prompt}.input_ids"], golden()[f"{prompt}.generated"][:, :24]], dim=1)
    check_golden(ids, torch.ones_like(ids, dtype=torch.bool), golden()[f"{prompt}.engram_hash"], rows_of)


@FORMS
def test_golden_image(rows_of: RowsOf) -> None:
    """In ``vl.input_ids`` all 8 positions of the image span hold image_token_id: the patches, the newlines and the start and
    end marks alike (``vl.token_types`` 0..3 at exactly these positions, -1 at text). All of them are dead."""
    prompt, types = golden()["vl.input_ids"], golden()["vl.token_types"]
    assert torch.equal(prompt == tiny_config().image_token_id, types >= 0) and int((types >= 0).sum()) == 8
    ids = torch.cat([prompt, golden()["vl.generated"][:, :8]], dim=1)
    check_golden(ids, ids != tiny_config().image_token_id, golden()["vl.engram_hash"], rows_of)


def check_golden(ids: torch.Tensor, alive: torch.Tensor, expected: torch.Tensor, rows_of: RowsOf) -> None:
    n = tiny_config().engram_max_ngram_size
    compressed = tiny_map()
    tokens, alive = with_start(compressed[ids], alive, n)
    windows = lookback(tokens, alive, n, int(compressed[tiny_config().engram_pad_token_id]))
    assert windows.dtype == torch.int32
    for i, layout in enumerate(engram_layouts(tiny_config())):
        assert torch.equal(rows_of(windows, layout).to(torch.int64), expected[:, :, i])


# Look-back


def test_lookback_by_hand() -> None:
    """Position 2 is dead: all pad there; behind it look-back ends at it; before the start there is only pad."""
    tokens = torch.tensor([[91, 92, 10, 11, 12, 13, 14, 15]], dtype=torch.int32)
    alive = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)
    expected = [[10, 2, 2], [11, 10, 2], [2, 2, 2], [13, 2, 2], [14, 13, 2], [15, 14, 13]]
    assert lookback(tokens, alive, 3, 2).tolist() == [expected]


def test_lookback_does_not_resume_behind_a_dead_token() -> None:
    tokens = torch.tensor([[10, 11, 12, 13]])
    alive = torch.tensor([[True, True, False, True]])
    assert lookback(tokens, alive, 4, 2).tolist() == [[[13, 2, 2, 2]]]


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("context", range(6))
def test_left_context(n: int, context: int) -> None:
    """One token with 0..5 tokens before it sees as many of them as n-1 slots take, then pad."""
    sequence = torch.arange(10, 11 + context)[None]
    tokens, alive = with_start(sequence, torch.ones_like(sequence, dtype=torch.bool), n)
    window = lookback(tokens[:, context:], alive[:, context:], n, 2)
    newest = sequence[0].flip(0).tolist()
    assert window.tolist() == [[(newest + [2] * n)[:n]]]


@FORMS
@pytest.mark.parametrize("n", [2, 4, 5])
def test_every_chunk_split_gives_the_rows_of_one_call(n: int, rows_of: RowsOf) -> None:
    """Batch of 3, with dead tokens: a call gets the n-1 positions before it, whatever call they came in."""
    (layout,) = engram_layouts(engram_config((3,), n=n, heads=3, vocab=50, compressed=430))
    generator = torch.Generator().manual_seed(n)
    length = 11
    sequence = torch.randint(0, 430, (3, length), generator=generator, dtype=torch.int32)
    tokens, alive = with_start(sequence, torch.rand(3, length, generator=generator) < 0.8, n)
    whole = rows_of(lookback(tokens, alive, n, 2), layout)
    assert whole.shape == (3, length, 3 * (n - 1))
    for split in range(1, length):
        first, second = slice(0, n - 1 + split), slice(split, None)
        parts = [rows_of(lookback(tokens[:, part], alive[:, part], n, 2), layout) for part in (first, second)]
        assert torch.equal(torch.cat(parts, dim=1), whole)
    for p in range(length):
        one = slice(p, p + n)
        assert torch.equal(rows_of(lookback(tokens[:, one], alive[:, one], n, 2), layout), whole[:, p : p + 1])


# Row ids


@FORMS
@pytest.mark.parametrize("seed", range(12))
def test_random_configurations_against_python_integers(seed: int, rows_of: RowsOf) -> None:
    draw = random.Random(seed)
    compressed = draw.choice([5, 430, 99_092, 2**20])
    config = engram_config(
        layers=tuple(draw.sample(range(8), draw.randint(1, 3))) if seed else (0, 7),
        n=draw.randint(2, 6),
        heads=draw.randint(1, 5),
        vocab=draw.choice([1, 2, 97, 1000, 65_521, 3_000_000]),
        compressed=compressed,
    )
    pad = draw.randrange(compressed)
    tokens = [[draw.randrange(compressed) for _ in range(17)] for _ in range(2)]
    alive = [[draw.random() < 0.85 for _ in range(17)] for _ in range(2)]
    n = config.engram_max_ngram_size
    windows = lookback(*with_start(torch.tensor(tokens, dtype=torch.int32), torch.tensor(alive), n), n, pad)
    expected = [plain_rows(config, *row, pad) for row in zip(tokens, alive, strict=True)]
    for i, layout in enumerate(engram_layouts(config)):
        assert rows_of(windows, layout).tolist() == [row[i] for row in expected]


@pytest.mark.parametrize("config", [tiny_config, release_config], ids=["tiny", "release"])
def test_limbs_equal_int64_on_many_windows(config: Callable[[], ModelConfig]) -> None:
    generator = torch.Generator().manual_seed(0)
    limit = config().engram_compressed_vocab_size
    n = config().engram_max_ngram_size
    windows = torch.randint(0, limit, (4, 5000, n), generator=generator, dtype=torch.int32)
    windows[:, :40] = torch.where(windows[:, :40] % 2 == 0, 0, limit - 1)
    for layout in engram_layouts(config()):
        exact = row_ids(windows, layout)
        assert exact.dtype == torch.int64 and int(exact.min()) >= 0 and int(exact.max()) < layout.rows
        narrow = row_ids_limbs(windows, layout)
        assert narrow.dtype == torch.int32 and torch.equal(narrow.to(torch.int64), exact)


def largest_layout(n: int, limit: int, primes: tuple[int, ...]) -> EngramLayout:
    """The largest multipliers that ``limit`` compressed ids allow."""
    multiplier = 2 * (max(1, (2**63 - 1) // limit // 2) - 1) + 1
    offsets = tuple(sum(primes[:i]) for i in range(len(primes)))
    return EngramLayout(0, (multiplier,) * n, primes, offsets, sum(primes))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_limbs_equal_python_integers(data: st.DataObject) -> None:
    """Any odd multipliers, moduli up to 2^30 (prime or not), ids up to 2^30; and no int32 step along the way wraps."""
    limit = data.draw(st.integers(1, 2**30), label="compressed ids")
    n, heads = data.draw(st.integers(2, 5), label="n"), data.draw(st.integers(1, 3), label="heads")
    bound = max(1, (2**63 - 1) // limit // 2)
    multipliers = [2 * data.draw(st.integers(0, bound - 1)) + 1 for _ in range(n)]
    columns = (n - 1) * heads
    top = min(2**30 - 1, (2**31 - 1) // columns)
    primes = tuple(data.draw(st.integers(2, top)) for _ in range(columns))
    offsets = tuple(sum(primes[:i]) for i in range(columns))
    layout = EngramLayout(0, tuple(multipliers), primes, offsets, sum(primes))
    window = data.draw(st.lists(st.integers(0, limit - 1), min_size=n, max_size=n), label="window")
    value, expected = window[0] * multipliers[0], []
    for t in range(1, n):
        value ^= window[t] * multipliers[t]
        expected += [value % primes[c] + offsets[c] for c in range((t - 1) * heads, t * heads)]
    windows = torch.tensor([[window]], dtype=torch.int32)
    with Exact32():
        narrow = row_ids_limbs(windows, layout)
    assert narrow.tolist() == row_ids(windows, layout).tolist() == [[expected]]


@pytest.mark.parametrize("limit", [1, 430, 99_092, 2**28, 2**30])
def test_no_int32_step_wraps_at_the_extremes(limit: int) -> None:
    for primes in [(2**30 - 35,), (16_777_213, 16_777_199), (2, 3)]:
        windows = torch.full((1, 1, 2), limit - 1, dtype=torch.int32)
        layout = largest_layout(2, limit, primes)
        with Exact32():
            narrow = row_ids_limbs(windows, layout)
        assert narrow.tolist() == row_ids(windows, layout).tolist()


def test_tables_beyond_32_bits_are_refused_by_the_limb_form_only() -> None:
    windows = torch.zeros(1, 1, 2, dtype=torch.int32)
    for primes in [(2**30 + 3,), (2**30 - 35, 2**30 - 35, 2**30 - 35)]:
        layout = largest_layout(2, 430, primes)
        assert row_ids(windows, layout).shape == (1, 1, len(primes))
        with pytest.raises(ConfigError, match="engram layer 0: 32-bit row ids need"):
            row_ids_limbs(windows, layout)


@FORMS
def test_one_static_graph(rows_of: RowsOf) -> None:
    """Exports without a graph break or a host read, and gives the same rows on other values."""

    class Rows(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
            return rows_of(lookback(tokens, alive, 4, 2), engram_layouts(release_config())[1])

    def values(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 99_092, (2, 3 + 5), generator=generator, dtype=torch.int32)
        return tokens, torch.rand(2, 3 + 5, generator=generator) < 0.8

    exported = torch.export.export(Rows(), values(0), strict=False).module()
    assert torch.equal(exported(*values(1)), Rows()(*values(1)))
