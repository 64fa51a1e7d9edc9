# SPDX-License-Identifier: Apache-2.0
"""The operations that run kernels, in the emulator, against the PyTorch ones."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
import torch
from comparing import DTYPES, normal
from nki_emulator import real_nki
from paired import close, pair
from torch import Tensor

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.formats import qdq_fp4_e4m3, qdq_fp4_ue8m0, qdq_fp8
from modeling_deepseek_v41.hyper_connections import HyperConnection
from modeling_deepseek_v41.kernels import nki_attention_ops, nki_expert_ops, nki_launch, nki_row_ops
from modeling_deepseek_v41.kernels.dispatch import TORCH, operations
from modeling_deepseek_v41.kernels.nki import activation_qdq, fold, slots, sparse_attention, split
from modeling_deepseek_v41.kernels.nki_layout import as_linear
from modeling_deepseek_v41.linear import Linear
from modeling_deepseek_v41.state import State, make_call

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a"


def table(batch: int, tokens: int, width: int) -> Tensor:
    """Rotary rows of random angles."""
    angle = normal(batch, tokens, width // 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, cos], -1).flatten(2), torch.stack([-sin, sin], -1).flatten(2)], 2)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "start", "length"), [(1, [40, 0], [1, 1]), (6, [40, 3], [6, 2]), (200, [10, 0], [200, 150])]
)
def test_attend(tokens, start, length, dtype):
    """Decode, verification with padding, and a prefill of more than one kernel call, with and without selected rows."""
    plain, kernels = pair(dtype)
    window, heads, dim, groups, k = 16, 2, 64, 300, 130
    call = make_call(torch.tensor(start), torch.tensor(length), torch.tensor([1, 0]), tokens, 1024)
    state = State(["ring"], (normal(2, 30, dim).to(dtype),), call)
    q, kv = normal(2, tokens, heads, dim, seed=1).to(dtype).float(), normal(2, tokens, dim, seed=2).to(dtype)
    cache, rows = normal(2, groups, dim, seed=3).to(dtype), table(2, tokens, 32)
    chosen = torch.arange(k).expand(2, tokens, k) * 2
    chosen = chosen.masked_fill(chosen >= 4 + call.positions.unsqueeze(-1), -1)
    for far in (None, (cache, chosen)):
        arguments = (q, kv, "ring", far, rows, normal(heads, seed=4), window, state)
        close(kernels.ops.attend(*arguments, kernels), plain.ops.attend(*arguments, plain), dtype)


@DTYPES
def test_attend_block(dtype):
    plain, kernels = pair(dtype)
    window, heads, dim, tokens = 16, 2, 64, 5
    call = make_call(torch.tensor([40, 3]), torch.tensor([5, 5]), torch.tensor([1, 0]), tokens, 1024)
    state = State(["ring"], (normal(2, 30, dim).to(dtype),), call)
    q, kv = normal(2, tokens, heads, dim, seed=1).to(dtype).float(), normal(2, tokens, dim, seed=2).to(dtype)
    arguments = (q, kv, "ring", table(2, tokens, 32), normal(heads, seed=4), window, state)
    close(kernels.ops.attend_block(*arguments, kernels), plain.ops.attend_block(*arguments, plain), dtype)


@DTYPES
def test_attention_of_an_inactive_row_reads_no_state(dtype):
    """Slot 0 holds NaN; the inactive row's call says position 40."""
    _, kernels = pair(dtype)
    call = make_call(torch.tensor([40, 40]), torch.tensor([5, 5]), torch.tensor([-1, 1]), 5, 1024)
    ring = normal(2, 30, 64).to(dtype)
    ring[0] = torch.nan
    q, kv = normal(2, 5, 2, 64, seed=1).to(dtype).float(), normal(2, 5, 64, seed=2).to(dtype)
    rest = table(2, 5, 32), normal(2, seed=4), 16, State(["ring"], (ring,), call), kernels
    assert kernels.ops.attend(q, kv, "ring", None, *rest).isfinite().all()
    assert kernels.ops.attend_block(q, kv, "ring", *rest).isfinite().all()


@DTYPES
def test_index_scores_and_top_ascending(dtype):
    plain, kernels = pair(dtype)
    query, weights, keys = normal(3, 4, 32).to(dtype), normal(3, 4, seed=1).to(dtype), normal(2, 32, 600, seed=2).to(dtype)
    arguments = (query, weights, keys, torch.tensor([1]), 577)
    scores = plain.ops.index_scores(*arguments, plain)
    close(kernels.ops.index_scores(*arguments, kernels), scores, dtype)
    visible = torch.arange(577) < torch.tensor([[577], [40], [0]])
    for k in (5, 100, 512, 700):
        expected = plain.ops.top_ascending(scores, visible, k)
        assert torch.equal(kernels.ops.top_ascending(scores, visible, k), expected)
        assert torch.equal(kernels.ops.top_ascending(scores.to(dtype), visible, k), expected)


@DTYPES
def test_mixes(dtype):
    plain, kernels = pair(dtype)
    x, raw = normal(2, 70, 4, 48).to(dtype).float(), normal(2, 70, 24, seed=1)
    arguments = (raw, x, normal(24, seed=2), normal(24, seed=3), 19, 1e-6, 1e-20)
    for found, expected in zip(kernels.ops.mixes(*arguments, kernels), plain.ops.mixes(*arguments, plain), strict=True):
        close(found, expected, torch.float32)


@DTYPES
@pytest.mark.parametrize(
    ("hc", "dim", "launches"),
    [(4, 128, {"sublayer_input"}), (3, 96, {"sublayer_input"}), (2, 4192, {"linear", "mixes", "collapse"})],
)
def test_sublayer_input(hc, dim, launches, dtype):
    """In one launch, and one by one where the columns of a stream divide into more parts than there are partitions."""
    plain, kernels = pair(dtype)
    config = dataclasses.replace(load_config(TINY / "ckpt"), hc_mult=hc, hidden_size=dim)
    module, sound = HyperConnection(config, kernels), HyperConnection(config, plain)
    for seed, parameter in enumerate(sound.parameters()):
        parameter.copy_(normal(*parameter.shape, seed=seed) * (0.1 if parameter.dim() == 2 else 1.0))
    module.load_state_dict(sound.state_dict())
    kernels.ops.lay_out(module)
    x, before = normal(2, 3, hc, dim).to(dtype).float(), normal(2, 3, hc, seed=5)
    emulated.launched.clear()
    h, *mixes = module(x, before, 1 + normal(dim, seed=6) / 4)
    assert set(emulated.launched) == launches
    expected, *coefficients = sound(x, before, 1 + normal(dim, seed=6) / 4)
    close(h, expected, dtype)
    for found, one in zip(mixes, coefficients, strict=True):
        close(found, one, torch.float32)


@DTYPES
def test_quantise(dtype):
    """Activations, index keys and compressed KV: to the bit, also in fp32 numerics, whose values bf16 does not hold."""
    plain, kernels = pair(dtype)
    x = normal(2, 7, 96).to(dtype).float()
    emulated.launched.clear()
    assert torch.equal(kernels.ops.quantise(x, kernels), plain.ops.quantise(x, plain))
    assert torch.equal(kernels.ops.quantise_index(x), plain.ops.quantise_index(x))
    assert torch.equal(kernels.ops.quantise_compressed(x), plain.ops.quantise_compressed(x))
    first = "activation_qdq" if dtype == torch.bfloat16 else "group_qdq"
    assert set(emulated.launched) == {first, "group_qdq", "compressed_qdq"}


@DTYPES
@pytest.mark.parametrize(("k", "n"), [(96, 40), (160, 7), (64, 1)])
def test_linear_and_grouped(k, n, dtype):
    """Even and odd numbers of outputs: two cores and one. Sums are exact in any order."""
    plain, kernels = pair(dtype)
    layer, groups = Linear(k, n, kernels), 3
    layer.weight.data = (normal(n, k, seed=1) * 4).round() / 16
    x, shared = (normal(2, 5, groups, k) * 8).round(), (normal(groups, n, k, seed=2) * 4).round() / 16
    expected = plain.ops.linear(x[:, :, 0], layer.weight, True, plain)
    kernels.ops.lay_out(layer)
    assert torch.equal(kernels.ops.linear(x[:, :, 0], layer.weight, True, kernels), expected)
    packed = torch.stack([as_linear(weight.to(dtype)) for weight in shared])
    assert torch.equal(kernels.ops.grouped(x, packed, kernels), plain.ops.grouped(x, shared, plain))


@DTYPES
@pytest.mark.parametrize("form", ["fp8", "fp4_ue8m0", "fp4_e4m3"])
def test_rotate_and_quantise(form, dtype):
    """The QDQ of the kernel's own rotation, to the bit."""
    plain, kernels = pair(dtype)
    for x in (normal(2, 5, 96).to(dtype).float(), normal(2, 5, 4, 96).to(dtype).float()):
        turned = kernels.ops.rotate(x, table(2, 5, 32), kernels)
        qdq = {"fp8": qdq_fp8, "fp4_ue8m0": qdq_fp4_ue8m0, "fp4_e4m3": qdq_fp4_e4m3}[form]
        assert torch.equal(kernels.ops.rotate_and_quantise(x, table(2, 5, 32), form, kernels), qdq(turned))


@DTYPES
def test_rows(dtype):
    """Norm, rotary embedding, both collapses, expansion, pooling, the engram's gate and SwiGLU of two short sequences."""
    plain, kernels = pair(dtype)

    def check(name: str, *arguments: object, **options: object) -> None:
        found, expected = (getattr(a.ops, name)(*arguments, a, **options) for a in (kernels, plain))
        close(found, expected, dtype)

    streams, y = normal(2, 5, 4, 96).to(dtype).float(), normal(2, 5, 96, seed=1).to(dtype).float()
    pre, comb, weight = normal(2, 5, 4, seed=2), normal(2, 5, 4, 4, seed=3), normal(96, seed=4)
    check("normalise", y, weight, 1e-20)
    for x in (y, streams):
        check("rotate", x, table(2, 5, 32))
        check("rotate", x, table(2, 5, 32), back=True)
    check("collapse", streams, pre, weight, 1e-20)
    check("weighted_sum", streams, pre)
    check("expand", y, streams, pre, comb)
    check("compress_pool", normal(2, 3, 4, 96), normal(2, 3, 4, 96, seed=5), weight, 1e-20)
    key = normal(2, 5, 4, 96, seed=6).to(dtype).float()
    check("engram_gate", streams, key, y.unsqueeze(2), normal(4, 96, seed=7), 1e-20)
    raw = dataclasses.replace(plain, quantize_activations=False), dataclasses.replace(kernels, quantize_activations=False)
    gate_up = normal(6, 192).to(dtype).float() * 4
    for routing in (None, normal(6, seed=8).sigmoid()):
        expected, found = (a.ops.swiglu(gate_up, routing, 2.0, a) for a in raw)
        close(found, expected, dtype)


def test_route():
    """Ids to the bit, also of equal scores; weights within 1e-5."""
    plain, kernels = pair(torch.float32)
    logits, bias = (normal(2, 5, 48) * 4).round() / 4, (normal(48, seed=1) * 2).round() / 64
    for arguments in ((logits, bias, 3, True, 1.5), (logits, bias * 0, 8, False, 1.0)):
        ids, weights = kernels.ops.route(*arguments, kernels)
        expected, shares = plain.ops.route(*arguments, plain)
        assert torch.equal(ids, expected) and ids.dtype == torch.int64
        close(weights, shares, torch.float32)


@pytest.mark.parametrize("blocks", [5, 128, 300])
def test_candidate_blocks(blocks):
    """To the bit, with ties, rows that see nothing and blocks without a visible score."""
    plain, kernels = pair(torch.float32)
    seen = torch.tensor([[0], [1], [4 * blocks], [2 * blocks + 3]])
    best = (normal(4, blocks) * 4).round()
    best = best.masked_fill(torch.arange(blocks) > (seen - 1) // 4, -torch.inf).masked_fill(seen == 0, -torch.inf)
    for most in (1, 4, blocks):
        expected = plain.ops.candidate_blocks(best, seen, 4, most)
        assert torch.equal(kernels.ops.candidate_blocks(best, seen, 4, most), expected)
        assert torch.equal(kernels.ops.candidate_blocks(best.bfloat16(), seen, 4, most), expected)


def test_constants():
    """Those that the operations repeat, for they need no nki."""
    assert (nki_launch.PARTITIONS, nki_launch.BANK) == (split.PARTITIONS, split.BANK)
    assert (nki_launch.MOST_ROWS, nki_expert_ops.SLOTS) == (slots.MOST_ROWS, slots.SLOTS)
    assert nki_expert_ops.GROUP == activation_qdq.GROUP
    assert nki_row_ops.DECODE_ROWS == 2 * fold.DECODE_ROWS
    assert nki_attention_ops.HIDDEN == sparse_attention.HIDDEN


def test_names():
    """A registered implementation is found by name, and its name is taken."""
    assert operations(emulated.NAME) is emulated.operations and emulated.operations.linear is not TORCH.linear
    with pytest.raises(RequestError, match="'emulator' is taken"):
        emulated.register(emulated.operations)
    with pytest.raises(RequestError, match=r"nki, emulator.*, found 'emulated'"):
        operations("emulated")


@pytest.mark.skipif(real_nki(), reason="nki is installed")
def test_nki_without_nki_is_an_error():
    """In a process without the emulator: no fallback."""
    words = "from modeling_deepseek_v41.kernels.dispatch import operations; operations('nki')"
    result = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1 and "RequestError: kernels: nki is not installed" in result.stderr
