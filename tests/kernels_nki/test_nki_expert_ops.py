# SPDX-License-Identifier: Apache-2.0
"""The operation over a layer's experts as kernels in the emulator, against PyTorch on the decoded weights."""

import dataclasses

import emulated
import pytest
import torch
from comparing import normal
from paired import close, pair
from stored_experts import StoredExperts
from stored_experts import bank as stored_bank
from torch import Tensor

from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.expert_bank import ExpertBank
from modeling_deepseek_v41.experts import as_bank, local_experts
from modeling_deepseek_v41.kernels.nki_layout import as_linear
from modeling_deepseek_v41.numerics import Arithmetic

BF16 = torch.bfloat16


def bank(stored: StoredExperts, a: Arithmetic, storage: str, whole: bool = True) -> ExpertBank:
    """``stored``, kept as ``storage`` and laid out for the operations of ``a``."""
    made = stored_bank(a, stored, storage)
    made.whole = whole
    a.ops.lay_out(made)
    return made


def tokens_of(experts: int, tokens: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """x with few bits, so that products are exact in any order; three experts a row, of these and another rank's; weights."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (2, tokens, d), generator=draw) * 2.0**-4
    ids = torch.rand(2, tokens, experts + 1, generator=draw).argsort(-1)[..., :3]
    return x, ids, torch.rand(2, tokens, 3, generator=draw)


def summed(inputs: tuple[Tensor, Tensor, Tensor], experts: ExpertBank, stored: StoredExperts, a: Arithmetic) -> Tensor:
    """The chosen ones of ``experts`` and the shared one that is ``stored``."""
    shared = bank(stored, a, "bf16")
    return local_experts(*inputs, experts, a.ops.shared_expert(inputs[0], as_bank(shared.tensors, True), 2.0, a), 2.0)


@pytest.mark.parametrize("whole", [True, False], ids=["whole on one core", "shares on two"])
@pytest.mark.parametrize("tokens", [1, 6, 130], ids=["decode", "verification", "prefill"])
def test_experts(tokens, whole):
    """Chosen ones, another rank's (number 5) and the shared one, as the decoded weights give them, in either format."""
    plain, kernels = pair(torch.bfloat16)
    stored, always = StoredExperts(5, 128, 96), StoredExperts(1, 128, 96, seed=1)
    inputs = tokens_of(5, tokens, 128)
    expected = summed(inputs, bank(stored, plain, "bf16", whole), always, plain)
    for storage, calls in (("fp8_exact", {"active_experts": -(-2 * tokens // 128), "linear": 2, "swiglu": 1}),
                           ("bf16", {"linear": 12, "swiglu": 6})):  # fmt: skip
        emulated.launched.clear()
        found = summed(inputs, bank(stored, kernels, storage, whole), always, kernels)
        assert emulated.launched == calls
        close(found, expected, torch.float32)


def test_experts_in_fp32():
    """Numerics without rounding run the same kernels on fp32 weights."""
    plain, kernels = pair(torch.float32)
    stored, always, inputs = StoredExperts(3, 128, 96), StoredExperts(1, 128, 96, seed=1), tokens_of(3, 4, 128)
    expected = summed(inputs, bank(stored, plain, "bf16"), always, plain)
    emulated.launched.clear()
    close(summed(inputs, bank(stored, kernels, "bf16"), always, kernels), expected, torch.float32)
    assert emulated.launched == {"linear": 8, "swiglu": 4}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "shares"])
def test_experts_with_rows_that_fp8_cannot_hold(whole):
    """Two of five, for a row of w1 and for rows of w2 and w3, are linears in bf16: no value is lost, the others stay fused."""
    plain, kernels = pair(torch.bfloat16)
    wide = {"w1": [(1, 0)], "w2": [(3, 5), (3, 127)], "w3": [(3, 95)]}
    stored, always, inputs = StoredExperts(5, 128, 96, wide=wide), StoredExperts(1, 128, 96, seed=1), tokens_of(5, 6, 128)
    expected = summed(inputs, bank(stored, plain, "bf16", whole), always, plain)
    made = bank(stored, kernels, "fp8_exact", whole)
    assert made.w13_places.tolist() == made.w2_places.tolist() == [1, 3]
    emulated.launched.clear()
    close(summed(inputs, made, always, kernels), expected, torch.float32)
    assert emulated.launched == {"active_experts": 1, "linear": 6, "swiglu": 3}


@pytest.mark.parametrize(
    ("batch", "tokens", "d", "experts", "inter", "whole", "dtype", "launches"),
    [
        (2, 3, 256, 16, 96, False, BF16, 1), (40, 1, 256, 16, 96, False, BF16, 2), (1, 7, 256, 16, 96, False, BF16, 0),
        (2, 3, 256, 16, 96, True, BF16, 0), (2, 3, 128, 16, 96, False, BF16, 0), (2, 3, 256, 12, 96, False, BF16, 0),
        (2, 3, 256, 16, 40, False, BF16, 0), (2, 3, 256, 16, 96, False, torch.float32, 0),
    ],
)  # fmt: skip
def test_route_and_share(batch, tokens, d, experts, inter, whole, dtype, launches):
    """Decode, more rows than a launch takes, a prompt, a whole shared expert, shapes that do not fit, and fp32.

    Small multiples of powers of two: all sums before h are exact in any order.
    """
    plain, kernels = pair(dtype)
    x = (normal(batch, tokens, d) * 8).round().clamp(-15, 15)
    gate, bias = (normal(experts, d, seed=1) * 4).round() / 512, normal(experts, seed=2) / 4
    w13, w2 = (normal(2 * inter, d, seed=3) * 4).round() / 256, normal(d, inter, seed=4).to(dtype).float()
    if inter % 32:
        plain, kernels = (dataclasses.replace(a, quantize_activations=False) for a in (plain, kernels))
    shared, packed = ([as_bank([one[None] for one in weights], whole, 0.125) for weights in (
        [w13.to(dtype), w2.to(dtype)], [as_linear(one.to(dtype)) for one in (w13, w2)])])  # fmt: skip
    emulated.launched.clear()
    found = kernels.ops.route_and_share(x, as_linear(gate.to(dtype)), bias, 2, True, 1.5, packed, 2.0, kernels)
    assert emulated.launched.get("route_and_share", 0) == launches and bool(launches) == (len(emulated.launched) == 1)
    expected = plain.ops.route_and_share(x, gate, bias, 2, True, 1.5, shared, 2.0, plain)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    close(found[1], expected[1], torch.float32)
    differ = (found[3] - expected[3]).abs().amax(-1) > 1e-5 * expected[3].abs().amax()
    assert differ.float().mean() < 0.1 or whole


@pytest.mark.parametrize(("dtype", "storage"), [(torch.float32, "fp8_exact"), (torch.bfloat16, "fp4_bytes")])
def test_formats_that_no_kernel_reads(dtype, storage):
    """Refused at load, with what to choose instead."""
    with pytest.raises(RequestError, match=rf"the NKI kernels read bf16 and, in release numerics, fp8_exact; found {storage}"):
        bank(StoredExperts(1, 64, 32), pair(dtype)[1], storage)
