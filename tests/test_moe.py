# SPDX-License-Identifier: Apache-2.0
"""The router and the experts: rules that no golden file pins, against float64."""

import dataclasses
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from arithmetics import EXACT_TOKENS, KERNELS, arithmetic
from stored_experts import StoredExperts, bank
from torch import Tensor

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.expert_bank import ExpertBank
from modeling_deepseek_v41.experts import as_bank, local_experts
from modeling_deepseek_v41.moe import Router
from modeling_deepseek_v41.numerics import Arithmetic

TINY = load_config(Path(__file__).parent / "data" / "golden" / "tiny_a" / "ckpt")
TOKENS = pytest.mark.parametrize("tokens", [1, 2, EXACT_TOKENS, EXACT_TOKENS + 5])
"""Decode and verification, and one call of prefill."""

EXPERTS, SHARED = StoredExperts(8, 64, 32), StoredExperts(1, 64, 32, seed=9)
WIDE = StoredExperts(8, 64, 64, wide={"w1": [(0, 5), (7, 31)], "w3": [(7, 0)], "w2": [(0, 0), (3, 63)]})
"""The same with rows that fp8 cannot hold: exceptions of fp8_exact."""


def scores(logits: Tensor, kernels: str) -> Tensor:
    """The router's score of each logit [T]: the weight of an only expert."""
    a = arithmetic("fp32", kernels)
    return a.ops.route(logits.view(1, -1, 1), torch.zeros(1), 1, False, 1.0, a)[1].flatten()


@KERNELS
def test_scores_are_the_root_of_softplus_from_minus_to_plus_200(kernels: str) -> None:
    """5e-7: a few fp32 roundings; below -172 the score is subnormal in fp32 and keeps fewer digits."""
    logits = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([-16.0, -15.999999, -0.0, 0.0, 1e-30, -87.4, 88.8])])
    found = scores(logits, kernels).double().numpy()
    with mpmath.workdps(60):
        expected = np.array([float(mpmath.sqrt(mpmath.log1p(mpmath.exp(mpmath.mpf(x))))) for x in logits.tolist()])
    normal = expected > 2.0**-126
    np.testing.assert_allclose(found[normal], expected[normal], rtol=5e-7)
    assert (found > 0).all() and np.isfinite(found).all()
    np.testing.assert_allclose(found[~normal], expected[~normal], atol=2.0**-148)


@KERNELS
@TOKENS
def test_the_bias_chooses_and_the_scores_weigh(tokens: int, kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    logits = torch.randn(2, tokens, 9, generator=torch.Generator().manual_seed(0)) * 3
    bias = torch.randn(9, generator=torch.Generator().manual_seed(1))
    ids, weights = a.ops.route(logits, bias, 4, True, 1.5, a)
    score = np.sqrt(np.logaddexp(0, logits.double().numpy()))
    for b in range(2):
        for t in range(tokens):
            best = sorted(range(9), key=lambda e: -(score[b, t, e] + bias[e].item()))[:4]
            assert ids[b, t].tolist() == best
            expected = score[b, t, best] / (score[b, t, best].sum() + 1e-20) * 1.5
            np.testing.assert_allclose(weights[b, t].numpy(), expected, rtol=1e-6)


@KERNELS
def test_equal_experts_are_taken_by_lower_id(kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    ids, _ = a.ops.route(torch.zeros(1, 1, 8), torch.tensor([0.0, 1.0, 0, 1, 1, 0, 2, 0]), 5, True, 1.0, a)
    assert ids[0, 0].tolist() == [6, 1, 3, 4, 0]
    ids, _ = a.ops.route(torch.full((1, 1, 8), -200.0), torch.zeros(8), 3, True, 1.0, a)
    assert ids[0, 0].tolist() == [0, 1, 2]


@KERNELS
def test_a_bias_of_zero_with_a_sign_is_no_difference(kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    bias = torch.tensor([-0.0, 0.0, -0.0, 0.0]) - scores(torch.zeros(1), kernels)
    assert a.ops.route(torch.zeros(1, 1, 4), bias, 4, False, 1.0, a)[0][0, 0].tolist() == [0, 1, 2, 3]


@KERNELS
def test_the_weights_of_scores_that_vanish_stay_finite(kernels: str) -> None:
    """The sum has 1e-20 added, which is more than all scores here."""
    a = arithmetic("fp32", kernels)
    _, weights = a.ops.route(torch.full((1, 2, 4), -200.0), torch.zeros(4), 2, True, 1.5, a)
    assert weights.isfinite().all() and (weights < 1e-20).all()


@KERNELS
@pytest.mark.parametrize(("top_k", "normalises", "total"), [(1, True, None), (3, True, 2.5), (3, False, None)])
def test_weights_are_normalised_for_several_experts_only_and_always_scaled(
    top_k: int, normalises: bool, total: float | None, kernels: str
) -> None:
    config = dataclasses.replace(
        TINY, num_experts_per_tok=top_k, norm_topk_prob=normalises, routed_scaling_factor=2.5, dspark_num_experts_per_tok=2
    )
    router = Router(config, False, arithmetic("fp32", kernels))
    router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(3)) / 11)
    router.bias.zero_()
    x = torch.randn(1, 4, config.hidden_size, generator=torch.Generator().manual_seed(4))
    nothing = bank(router.arithmetic, StoredExperts(1, config.hidden_size, 32), "bf16")
    ids, weights, *_ = router(x, as_bank(nothing.tensors, True), 0.0)
    plain = 2.5 * np.sqrt(np.logaddexp(0, (x.double() @ router.weight.double().T).numpy()))
    plain = torch.from_numpy(plain).gather(-1, ids)
    expected = plain if total is None else plain / plain.sum(-1, keepdim=True) * total
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=0)


@KERNELS
@TOKENS
@pytest.mark.parametrize("numerics", ["release", "fp32"])
def test_one_operation_routes_quantises_and_shares(tokens: int, numerics: str, kernels: str) -> None:
    """What the four functions say by themselves: the router takes x as it is, the shared expert what the routed ones take."""
    a = arithmetic(numerics, kernels)
    x = a.round(torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(6)))
    gate, bias = torch.randn(8, 64, generator=torch.Generator().manual_seed(7)) / 8, torch.linspace(-1, 1, 8)
    shared = as_bank(bank(a, SHARED, "bf16").tensors, False, 0.25)
    ids, weights, quantised, y = a.ops.route_and_share(x, gate, bias, 3, True, 1.5, shared, 2.0, a)
    expected, shares = a.ops.route(a.ops.linear(x, gate, False, a), bias, 3, True, 1.5, a)
    assert torch.equal(ids, expected) and torch.equal(weights, shares) and torch.equal(quantised, a.activation(x))
    gate_up = a.round(quantised.double() @ shared.w13.rows[0].double().T)
    h = a.ops.swiglu(gate_up.float(), None, 2.0, a)
    exact = h.double() @ shared.w2.rows[0].double().T / 4
    assert (y - exact).abs().max() < (2e-6 if numerics == "fp32" else 1e-2) * exact.abs().max()


@KERNELS
def test_the_gate_is_clamped_from_above_only_and_up_on_both_sides(kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    gate, up = torch.tensor([[-50.0, -3.0, 1.0, 50.0]]), torch.tensor([[-50.0, 1.0, 2.0, 50.0]])
    gate, up = gate.repeat(1, 8), up.repeat(1, 8)
    found = a.ops.swiglu(torch.cat([gate, up], -1), torch.tensor([0.5]), 2.0, a).double()
    g, u = gate.double().clamp(max=2.0), up.double().clamp(-2.0, 2.0)
    torch.testing.assert_close(found, g / (1 + (-g).exp()) * u * 0.5, rtol=1e-6, atol=0)
    found = a.ops.swiglu(torch.cat([gate, up], -1), None, 0.0, a).double()
    g, u = gate.double(), up.double()
    torch.testing.assert_close(found, g / (1 + (-g).exp()) * u, rtol=1e-6, atol=0)


@KERNELS
def test_the_routing_weight_enters_before_the_rounding(kernels: str) -> None:
    """In release numerics silu(gate) * up * weight is rounded to bf16 once, then passes the fp8 QDQ."""
    a = arithmetic("release", kernels)
    gate_up = torch.randn(5, 128, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    routing = torch.rand(5, generator=torch.Generator().manual_seed(6))
    gate, up = gate_up.double().chunk(2, -1)
    product = gate / (1 + (-gate).exp()) * up * routing.double().unsqueeze(-1)
    expected = a.activation(product.bfloat16().float())
    assert (a.ops.swiglu(gate_up, routing, 0.0, a) == expected).float().mean() > 0.99


def naive(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertBank, shared: ExpertBank, limit: float) -> Tensor:
    """Every token and expert by itself, float64; the banks hold decoded weights."""

    def one(token: Tensor, w13: Tensor, w2: Tensor, weight: float) -> Tensor:
        gate, up = (w13.double() @ token).chunk(2)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return w2.double() @ (gate / (1 + (-gate).exp()) * up * weight)

    out = torch.zeros(x.shape, dtype=torch.float64)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            token = x[b, t].double()
            out[b, t] = one(token, shared.w13[0], shared.w2[0], 1.0)
            for expert, weight in zip(ids[b, t].tolist(), weights[b, t].tolist(), strict=True):
                out[b, t] += one(token, experts.w13[expert], experts.w2[expert], weight)
    return out


def summed(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertBank, shared: ExpertBank, limit: float) -> Tensor:
    """The chosen experts and the shared one, as MoE adds them up."""
    a = experts.arithmetic
    y = a.ops.shared_expert(x, as_bank(shared.tensors, shared.whole, shared.share), limit, a)
    return local_experts(x, ids, weights, experts, y, limit)


def call(a: Arithmetic, tokens: int, storage: str = "bf16") -> tuple[Tensor, Tensor]:
    """(found, expected) of one call over two sequences; an expert may be chosen by all tokens or none."""
    generator = torch.Generator().manual_seed(7)
    x = a.activation(a.round(torch.randn(2, tokens, 64, generator=generator)))
    ids = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(2 * tokens)]).view(2, tokens, 3)
    weights = torch.rand(2, tokens, 3, generator=generator)
    experts, decoded = (bank(a, EXPERTS, kind) for kind in (storage, "bf16"))
    shared = bank(a, SHARED, "bf16")
    return summed(x, ids, weights, experts, shared, 2.0), naive(x, ids, weights, decoded, shared, 2.0)


@KERNELS
@TOKENS
@pytest.mark.parametrize("storage", ["bf16", "fp4_bytes", "fp8_exact"])
def test_the_expert_operation_is_the_sum_over_chosen_experts(tokens: int, storage: str, kernels: str) -> None:
    """Row by row in decode, expert by expert in prefill: 2e-6 of the largest, both ways."""
    found, expected = call(arithmetic("fp32", kernels), tokens, storage)
    assert (found.double() - expected).abs().max() < 2e-6 * expected.abs().max()


@KERNELS
@TOKENS
def test_in_release_numerics_it_differs_by_rounding_alone(tokens: int, kernels: str) -> None:
    """Each product is rounded to bf16 and h passes the fp8 QDQ: some percent."""
    found, expected = call(arithmetic("release", kernels), tokens)
    assert 1e-4 < (found.double() - expected).abs().max() / expected.abs().max() < 5e-2


@KERNELS
@TOKENS
@pytest.mark.parametrize("numerics", ["release", "fp32"])
def test_weights_kept_as_bytes_give_the_same_result(tokens: int, numerics: str, kernels: str) -> None:
    a = arithmetic(numerics, kernels)
    found, expected = call(a, tokens, "fp4_bytes")[0], call(a, tokens)[0]
    assert (found - expected).abs().max() <= (1e-6 if numerics == "fp32" else 1e-2) * expected.abs().max()


@KERNELS
@pytest.mark.parametrize("numerics", ["release", "fp32"])
def test_a_row_of_decode_does_not_depend_on_the_others(numerics: str, kernels: str) -> None:
    a = arithmetic(numerics, kernels)
    generator = torch.Generator().manual_seed(8)
    x = a.activation(a.round(torch.randn(3, EXACT_TOKENS, 64, generator=generator)))
    ids = torch.randint(8, (3, EXACT_TOKENS, 2), generator=generator)
    weights = torch.rand(3, EXACT_TOKENS, 2, generator=generator)
    experts, shared = bank(a, EXPERTS, "bf16"), bank(a, SHARED, "bf16")
    whole = summed(x, ids, weights, experts, shared, 0.0)
    for b in range(3):
        for t in range(EXACT_TOKENS):
            one = (slice(b, b + 1), slice(t, t + 1))
            assert torch.equal(summed(x[one], ids[one], weights[one], experts, shared, 0.0), whole[one])


@KERNELS
@TOKENS
@pytest.mark.parametrize("numerics", ["release", "fp32"])
@pytest.mark.parametrize("stored", [EXPERTS, WIDE], ids=["all rows fit", "exceptions"])
def test_fp8_exact_gives_the_bits_of_fp4_bytes(stored: StoredExperts, tokens: int, numerics: str, kernels: str) -> None:
    a = arithmetic(numerics, kernels)
    generator = torch.Generator().manual_seed(7)
    x = a.activation(a.round(torch.randn(2, tokens, 64, generator=generator)))
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(2 * tokens)]).view(2, tokens, 3)
    weights = torch.rand(2, tokens, 3, generator=generator)
    shared = bank(a, SHARED, "bf16")
    found, expected = (
        summed(x, ids, weights, bank(a, stored, kind, rows), shared, 2.0)
        for kind, rows in (("fp8_exact", 3), ("fp4_bytes", None))
    )
    assert torch.equal(found, expected)


@KERNELS
@TOKENS
def test_parts_of_a_sum_stay_fp32(tokens: int, kernels: str) -> None:
    """Of a part of an expert's columns, also where all of a row's routed experts are another rank's."""
    a = arithmetic("release", kernels)
    experts, shared = bank(a, EXPERTS, "bf16"), bank(a, SHARED, "bf16")
    experts.whole = shared.whole = False
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    for chosen in (3, 8):
        ids, weights = torch.full((1, tokens, 2), chosen), torch.ones(1, tokens, 2)
        y = summed(x, ids, weights, experts, shared, 0.0)
        assert y.dtype == torch.float32 and not torch.equal(y, y.bfloat16().float())
