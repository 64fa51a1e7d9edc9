# SPDX-License-Identifier: Apache-2.0
"""The attention's projections as operations of kernels: fused in decode in release numerics, else one by one."""

import emulated
import pytest
import torch
from comparing import normal
from paired import close, pair
from rotary import table_of
from torch import Tensor

from modeling_deepseek_v41.kernels.nki_layout import as_linear

EPS = 1e-20
BF16, FP32 = torch.bfloat16, torch.float32


def coarse(*shape: int, seed: int) -> Tensor:
    """Small multiples of powers of two, whose sums are exact in any order."""
    return (normal(*shape, seed=seed) * 4).round() / 16


@pytest.mark.parametrize("beside", [0, 1, 3, 4])
@pytest.mark.parametrize(
    ("batch", "tokens", "k", "low", "dim", "rotary", "dtype", "launches"),
    [
        (2, 3, 128, 256, 256, 64, BF16, 1), (40, 1, 128, 256, 512, 128, BF16, 2), (1, 7, 128, 256, 256, 64, BF16, 0),
        (2, 3, 128, 192, 256, 64, BF16, 0), (2, 3, 96, 256, 256, 64, BF16, 0), (2, 3, 128, 256, 128, 64, BF16, 0),
        (2, 3, 128, 256, 256, 130, BF16, 0), (2, 3, 128, 256, 256, 64, FP32, 0),
    ],
)  # fmt: skip
def test_query_projection(batch, tokens, k, low, dim, rotary, dtype, launches, beside):
    """Decode, more rows than a launch takes, a prompt, shapes that do not fit, and fp32; with as many weights of x ``beside``
    as layers have, and one more. The weight of qr gives qr itself."""
    plain, kernels = pair(dtype)
    x, table = (normal(batch, tokens, k) * 8).round(), table_of(batch * tokens, rotary).unflatten(0, (batch, tokens))
    wq_a, norm, wq_b = coarse(low, k, seed=1), 1 + normal(low, seed=3) / 4, coarse(40, low, seed=4)
    wkv, kv_norm = coarse(dim, k, seed=2), 1 + normal(dim, seed=5) / 4
    of_qr, of_x = [torch.eye(low)] * min(beside, 1), [(coarse(8 + i, k, seed=i), i == 2) for i in range(0, 2 * beside, 2)]

    def packed(weight: Tensor) -> Tensor:
        return as_linear(weight.to(dtype))

    emulated.launched.clear()
    found = kernels.ops.query_projection(
        x, table, packed(wq_a), norm, packed(wq_b), packed(wkv), kv_norm, EPS, kernels,
        [packed(weight) for weight in of_qr], [(packed(weight), rounds) for weight, rounds in of_x],
    )  # fmt: skip
    launches = launches if beside <= 3 else 0
    assert emulated.launched.get("query_projection", 0) == launches and bool(launches) == (len(emulated.launched) == 1)
    expected = plain.ops.query_projection(
        x, table, wq_a, norm, wq_b, wkv, kv_norm, EPS, plain, of_qr or [torch.eye(low)], of_x
    )  # fmt: skip
    assert found.kv.dtype == dtype and ((found.kv - expected.kv).abs() > 1e-5 * expected.kv.abs().max()).float().mean() < 0.01
    for one, other in zip(found.of_x, expected.of_x, strict=True):
        assert torch.equal(one, other)
    (qr,) = expected.of_qr
    if beside:
        assert (((found.of_qr[0] - qr).abs() > 1e-5 * qr.abs().max()).float().mean()) < 0.01
        close(found.q, plain.ops.linear(found.of_qr[0], wq_b, True, plain), dtype)
    assert ((found.q - expected.q).abs() <= 2.0**-5 * expected.q.abs().max()).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "k", "columns", "dtype", "launches"),
    [
        (2, 3, 96, (40, 8), BF16, 1), (40, 1, 128, (8, 40, 16), BF16, 2), (1, 7, 96, (40, 8), BF16, 0),
        (2, 3, 96, (40, 7), BF16, 0), (2, 3, 96, (8,), BF16, 0), (2, 3, 96, (8, 8, 8, 8), BF16, 0),
        (2, 3, 96, (40, 8), FP32, 0),
    ],
)  # fmt: skip
def test_quantised_linears(batch, tokens, k, columns, dtype, launches, shared):
    """Decode, more rows than a launch takes, a prompt, an odd number of outputs, one weight and four, and fp32."""
    plain, kernels = pair(dtype)
    xs = [(normal(batch, tokens, k, seed=i) * 8).round() for i in range(1 if shared else len(columns))]
    weights = [coarse(n, k, seed=n + i) for i, n in enumerate(columns)]
    emulated.launched.clear()
    found = kernels.ops.quantised_linears(xs, [as_linear(weight.to(dtype)) for weight in weights], kernels)
    assert (emulated.launched == {"linears": launches}) if launches else ("linears" not in emulated.launched)
    for one, other in zip(found, plain.ops.quantised_linears(xs, weights, plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(
    ("tokens", "groups", "parts", "dtype", "fused"),
    [(3, 1, 1, BF16, True), (7, 1, 1, BF16, False), (3, 2, 1, BF16, False), (3, 1, 2, BF16, False), (3, 1, 1, FP32, False)],
)
def test_output_projection(tokens, groups, parts, dtype, fused, rounds):
    """Decode, a prompt, two groups, a part of the latent, and fp32: the sums of wo_a are exact, so is what goes to wo_b."""
    plain, kernels = pair(dtype)
    o, low, part = (normal(2, tokens, 2, 128) * 8).round(), 256, None if parts == 1 else (parts, torch.tensor([1]))
    wo_a, wo_b = coarse(groups * low, 256 // groups, seed=1), coarse(40, groups * low // parts, seed=2)
    laid_out = torch.cat([as_linear(weight.to(dtype)) for weight in wo_a.chunk(groups)]), as_linear(wo_b.to(dtype))
    emulated.launched.clear()
    found = kernels.ops.output_projection(o, *laid_out, groups, part, rounds, kernels)
    assert (set(emulated.launched) == {"output_projection"}) == fused
    close(found, plain.ops.output_projection(o, wo_a, wo_b, groups, part, rounds, plain), dtype if rounds else FP32)
