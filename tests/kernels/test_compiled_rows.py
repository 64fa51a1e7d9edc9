# SPDX-License-Identifier: Apache-2.0
"""The compiled loops for the CPU against the PyTorch functions that they stand in for.

Tolerances: fp32 sums come in another order, so results differ by a few units of 2^-24 relative to the largest magnitude
(1e-6); rounded to bf16, a value at a rounding boundary moves by one bf16 step (2^-8 of itself). QDQ and selection are exact.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.kernels.dispatch import KERNELS, operations
from modeling_deepseek_v41.numerics import NUMERICS, Arithmetic
from modeling_deepseek_v41.state import State, make_call

pytest.importorskip("numba")

REFERENCE, COMPILED = operations("torch"), operations("numba")


def arithmetic(name: str, kernels: Any) -> Arithmetic:
    plain = NUMERICS[name]
    values = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return Arithmetic(**values, ops=kernels, exact_tokens=6)


def close(found: Tensor, expected: Tensor, rounds: bool) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    scale = expected.abs().max()
    if not rounds:
        assert (found - expected).abs().max() <= 1e-6 * scale
        return
    step = expected.abs() * 2.0**-7 + 1e-6 * scale
    assert ((found - expected).abs() <= step).all()
    assert (found == expected).float().mean() > 0.99


@pytest.fixture(params=["release", "fp32"])
def pair(request: Any) -> tuple[Arithmetic, Arithmetic]:
    return arithmetic(request.param, REFERENCE), arithmetic(request.param, COMPILED)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize(("k", "n"), [(32, 5), (96, 24), (256, 515)])
def test_linear(pair: tuple[Arithmetic, Arithmetic], rows: int, k: int, n: int) -> None:
    slow, fast = pair
    x, weight = normal(1, rows, k) if rows < 7 else normal(rows, 1, k), normal(n, k, seed=1)
    close(fast.ops.linear(x, weight, True, fast), slow.ops.linear(x, weight, True, slow), slow.rounds)
    close(fast.ops.linear(x, weight, False, fast), slow.ops.linear(x, weight, False, slow), False)


def test_grouped(pair: tuple[Arithmetic, Arithmetic]) -> None:
    slow, fast = pair
    x, weight = normal(2, 3, 4, 64), normal(4, 72, 64, seed=1)
    close(fast.ops.grouped(x, weight, fast), slow.ops.grouped(x, weight, slow), slow.rounds)


def test_normalise_and_rotate(pair: tuple[Arithmetic, Arithmetic]) -> None:
    slow, fast = pair
    x, weight, table = normal(2, 3, 96), normal(96, seed=1), normal(2, 3, 2, 32, seed=2)
    table[:, :, 0, 1::2], table[:, :, 1, 1::2] = table[:, :, 0, ::2], -table[:, :, 1, ::2]
    close(fast.ops.normalise(x, weight, 1e-20, fast), slow.ops.normalise(x, weight, 1e-20, slow), slow.rounds)
    for back in (False, True):
        close(fast.ops.rotate(x, table, fast, back), slow.ops.rotate(x, table, slow, back), slow.rounds)
        heads = normal(2, 3, 5, 96, seed=3)
        close(fast.ops.rotate(heads, table, fast, back), slow.ops.rotate(heads, table, slow, back), slow.rounds)


@pytest.mark.parametrize("hc", [1, 2, 4])
def test_hyper_connections(pair: tuple[Arithmetic, Arithmetic], hc: int) -> None:
    slow, fast = pair
    x, raw = normal(2, 3, hc, 64), normal(2, 3, (2 + hc) * hc, seed=1)
    scale, base = normal((2 + hc) * hc, seed=2).abs(), normal((2 + hc) * hc, seed=3)
    found = fast.ops.mixes(raw, x, scale, base, 19, 1e-6, 1e-20, fast)
    expected = slow.ops.mixes(raw, x, scale, base, 19, 1e-6, 1e-20, slow)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max(), "19 rounds of fp32 divisions, in two algebraic forms"
    pre, post, comb = expected
    weight, y = normal(64, seed=4), normal(2, 3, 64, seed=5)
    close(fast.ops.collapse(x, pre, weight, 1e-20, fast), slow.ops.collapse(x, pre, weight, 1e-20, slow), slow.rounds)
    close(fast.ops.expand(y, x, post, comb, fast), slow.ops.expand(y, x, post, comb, slow), slow.rounds)


def test_quantisers_are_exact() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    finite = every[every.isfinite() & (every.abs() < 2.0**100)]
    x = finite[: finite.numel() // 64 * 64][torch.randperm(finite.numel() // 64 * 64)].view(1, -1, 64)
    for name in ("quantise", "quantise_index"):
        assert torch.equal(getattr(COMPILED, name)(x), getattr(REFERENCE, name)(x)), name
        wide = normal(1, 50, 64) * torch.logspace(-20, 20, 50).view(1, -1, 1)
        assert torch.equal(getattr(COMPILED, name)(wide), getattr(REFERENCE, name)(wide)), name


@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_swiglu(pair: tuple[Arithmetic, Arithmetic], limit: float) -> None:
    slow, fast = pair
    gate_up, routing = 20 * normal(5, 128), normal(5, seed=1).abs()
    for share in (routing, None):
        close(fast.ops.swiglu(gate_up, share, limit, fast), slow.ops.swiglu(gate_up, share, limit, slow), slow.rounds)


def test_route(pair: tuple[Arithmetic, Arithmetic]) -> None:
    slow, fast = pair
    logits, bias = 3 * normal(2, 3, 24), normal(24, seed=1)
    logits[0, 0, 5] = logits[0, 0, 3]
    logits[0, 1] = 0.0
    logits[1, 2, :4] = torch.tensor([200.0, -200.0, -15.9, -16.1])
    bias[3] = bias[5]
    for normalises in (True, False):
        ids, weights = fast.ops.route(logits, bias, 4, normalises, 1.5, fast)
        expected_ids, expected = slow.ops.route(logits, bias, 4, normalises, 1.5, slow)
        assert torch.equal(ids, expected_ids)
        close(weights, expected, False)


def test_top_ascending_is_exact() -> None:
    scores = torch.randint(-3, 4, (6, 50), generator=torch.Generator().manual_seed(0)).float() * 0.5
    scores[0, 7], scores[1] = -0.0, 0.0
    visible = torch.arange(50) < torch.tensor([50, 30, 8, 3, 1, 0]).unsqueeze(1)
    visible[0, ::3] = False
    for k in (1, 8, 60):
        assert torch.equal(COMPILED.top_ascending(scores, visible, k), REFERENCE.top_ascending(scores, visible, k))


def test_index_scores(pair: tuple[Arithmetic, Arithmetic]) -> None:
    slow, fast = pair
    query, weights = (normal(1, 3, 32), normal(1, 3, seed=1))
    query, weights, keys = query.to(slow.dtype), weights.to(slow.dtype), normal(2, 32, 1024, seed=2).to(slow.dtype)
    slot = torch.tensor([1])
    found = fast.ops.index_scores(query, weights, keys, slot, 512, fast)
    close(found, slow.ops.index_scores(query, weights, keys, slot, 512, slow), slow.rounds)


def attend(ops: Arithmetic, start: int, tokens: int, ring: Tensor, far: tuple[Tensor, Tensor] | None) -> Tensor:
    call = make_call(torch.tensor([start]), torch.tensor([tokens]), torch.tensor([1]), tokens, 512)
    state = State(["swa.0"], (ring,), call)
    q, kv = normal(1, 8, 4, 64, seed=5)[:, :tokens], normal(1, 8, 64, seed=6)[:, :tokens].to(ops.dtype)
    table = normal(1, 8, 2, 32, seed=7)[:, :tokens]
    table[:, :, 0, 1::2], table[:, :, 1, 1::2] = table[:, :, 0, ::2], -table[:, :, 1, ::2]
    if far is not None:
        far = far[0], far[1][:, :tokens]
    return ops.ops.attend(q, kv, "swa.0", far, table, normal(4, seed=8), 16, state, ops)


@pytest.mark.parametrize("start", [0, 3, 40])
@pytest.mark.parametrize("compressed", [False, True])
def test_attend(pair: tuple[Arithmetic, Arithmetic], start: int, compressed: bool) -> None:
    slow, fast = pair
    ring = normal(2, 30, 64).to(slow.dtype)
    ring[:, 29] = torch.nan
    chosen = torch.full((1, 8, 8), -1)
    chosen[0, 0, :3] = torch.tensor([0, 4, 9])
    chosen[0, 2:, :] = torch.arange(8)
    cache = normal(2, 16, 64, seed=9).to(slow.dtype)
    cache[:, 10:] = torch.nan
    far = (cache, chosen) if compressed else None
    found, expected = attend(fast, start, 3, ring, far), attend(slow, start, 3, ring, far)
    assert found.isfinite().all()
    close(found, expected, slow.rounds)
    alone = attend(fast, start, 1, ring, far)
    assert torch.equal(found[:, :1], alone), "a row's bits do not depend on the rows beside it"


@pytest.mark.parametrize("start", [1, 3, 40])
def test_attend_block(pair: tuple[Arithmetic, Arithmetic], start: int) -> None:
    """Against PyTorch, and against the definition: every query sees all keys, so their order does not matter."""
    slow, fast = pair
    ring, window, tokens = normal(2, 30, 64).to(slow.dtype), 16, 5
    used = torch.arange(max(start - window, 0), start) % 29
    unused = torch.ones(30, dtype=torch.bool)
    unused[used] = False
    ring[1, unused], ring[0] = torch.nan, torch.nan
    call = make_call(torch.tensor([start]), torch.tensor([tokens]), torch.tensor([1]), tokens, 512)
    state = State(["mtp.swa.0"], (ring,), call)
    q, kv, sink = normal(1, tokens, 4, 64, seed=5), normal(1, tokens, 64, seed=6).to(slow.dtype), normal(4, seed=8)
    table = torch.stack([torch.ones(1, tokens, 32), torch.zeros(1, tokens, 32)], 2)
    rest = table, sink, window, state
    expected = slow.ops.attend_block(q, kv, "mtp.swa.0", *rest, slow)
    close(fast.ops.attend_block(q, kv, "mtp.swa.0", *rest, fast), expected, slow.rounds)
    if not slow.rounds:
        keys = torch.cat([ring[1, used], kv[0]]).double()
        weights = torch.cat([q[0].double() @ keys.T * 64**-0.5, sink.double().expand(tokens, 4).unsqueeze(-1)], -1).softmax(-1)
        close(expected, (weights[..., :-1] @ keys).float().unsqueeze(0), False)


def test_rows_do_not_depend_on_their_number(pair: tuple[Arithmetic, Arithmetic]) -> None:
    fast = pair[1]
    x, weight, norm = normal(1, 6, 160), normal(77, 160, seed=1), normal(160, seed=2)
    for function in (
        lambda rows: fast.ops.linear(rows, weight, True, fast),
        lambda rows: fast.ops.normalise(rows, norm, 1e-20, fast),
        lambda rows: fast.ops.swiglu(rows[..., :128], None, 2.0, fast),
    ):
        together = function(x)
        for row in range(6):
            assert torch.equal(together[:, row : row + 1], function(x[:, row : row + 1]))


def test_names() -> None:
    assert operations("auto").name == "numba"
    assert {operations(name).name for name in KERNELS if name != "nki"} == {"torch", "numba"}
    with pytest.raises(RequestError, match=r"kernels: expected one of auto, torch, numba, nki.*, found 'cuda'"):
        operations("cuda")


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 24])
def test_equal_rows_give_equal_results(kernels: str, n: int) -> None:
    """Also where a product has few outputs: a matrix library may then treat the rows of one tile differently."""
    ops = arithmetic("fp32", operations(kernels))
    for seed in range(20):
        row, weight = normal(1, 1, 32, seed=seed), normal(n, 32, seed=seed + 100)
        together = ops.ops.linear(row.expand(1, 6, 32).contiguous(), weight, False, ops)
        assert torch.equal(together, together[:, :1].expand_as(together))
        assert torch.equal(together[:, :1], ops.ops.linear(row, weight, False, ops))
