# SPDX-License-Identifier: Apache-2.0
"""The mixing coefficients and both mixings against docs/model.md, section 3, written out in float64."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from arithmetics import KERNELS, arithmetic
from torch import Tensor

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.hyper_connections import HyperConnection

TINY = load_config(Path(__file__).parent / "data" / "golden" / "tiny_a" / "ckpt")
BATCH = pytest.mark.parametrize("shape", [(1, 1), (2, 6), (1, 9)])
"""Decode, verification, prefill."""


def connection(hc: int, iterations: int, kernels: str, numerics: str = "fp32", seed: int = 0) -> HyperConnection:
    """A module with random parameters: the mixes are of order 1, so that comb is far from symmetric."""
    config = dataclasses.replace(TINY, hc_mult=hc, hc_sinkhorn_iters=iterations)
    module = HyperConnection(config, arithmetic(numerics, kernels))
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    module.fn.mul_((hc * config.hidden_size) ** -0.5)
    return module


def mixes(module: HyperConnection, x: Tensor) -> tuple[Tensor, ...]:
    """pre, post and comb of streams x."""
    return module(x, torch.ones(x.shape[:-1]), torch.ones(x.shape[-1]))[1:]


def expected_mixes(module: HyperConnection, x: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """pre [hc], post [hc] and comb [from, to] of one token's streams x [hc, d]."""
    hc, eps = x.shape[0], 1e-6
    f = x.reshape(-1)
    fn, base, scale = (p.double().numpy() for p in (module.fn, module.base, module.scale))
    m = (fn @ f) / np.sqrt(np.mean(f**2) + 1e-20) * scale + base
    pre = 1 / (1 + np.exp(-m[:hc])) + eps
    post = 2 / (1 + np.exp(-m[hc : 2 * hc]))
    comb = np.exp(m[2 * hc :].reshape(hc, hc))
    comb = comb / comb.sum(1, keepdims=True) + eps
    comb = comb / (comb.sum(0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        comb = comb / (comb.sum(0, keepdims=True) + eps)
    return pre, post, comb


@KERNELS
@BATCH
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("hc", [1, 2, 3, 4, 5])
def test_mixes_are_those_of_the_text(hc: int, iterations: int, shape: tuple[int, int], kernels: str) -> None:
    """2e-6: some 20 fp32 roundings of numbers of order 1; the streams' size does not matter."""
    module = connection(hc, iterations, kernels, seed=hc)
    for size in (1.0, 1e-8, 1e8):
        x = torch.randn(*shape, hc, TINY.hidden_size, generator=torch.Generator().manual_seed(1)) * size
        found = mixes(module, x)
        for b in range(shape[0]):
            for t in range(shape[1]):
                for part, expected in zip(found, expected_mixes(module, x[b, t].double().numpy(), iterations), strict=True):
                    np.testing.assert_allclose(part[b, t].numpy(), expected, rtol=2e-6, atol=2e-6)


@KERNELS
def test_coefficients_are_fp32_in_every_arithmetic(kernels: str) -> None:
    x = torch.randn(1, 2, 4, TINY.hidden_size).bfloat16().float()
    release, exact = connection(4, 20, kernels, "release"), connection(4, 20, kernels, "fp32")
    for found, expected in zip(mixes(release, x), mixes(exact, x), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, expected)


@KERNELS
def test_post_has_no_epsilon_and_pre_has(kernels: str) -> None:
    module = connection(4, 20, kernels)
    module.base[:8] = -100.0
    pre, post, _ = mixes(module, torch.randn(1, 1, 4, TINY.hidden_size))
    assert (post < 1e-30).all() and (pre >= 0.999e-6).all() and (pre < 1.1e-6).all()


@KERNELS
def test_streams_of_zeros_give_finite_coefficients(kernels: str) -> None:
    for part in mixes(connection(4, 20, kernels), torch.zeros(1, 2, 4, TINY.hidden_size)):
        assert part.isfinite().all()


@KERNELS
@BATCH
def test_the_input_is_the_collapse_with_the_mix_before(shape: tuple[int, int], kernels: str) -> None:
    module = connection(4, 20, kernels, "release")
    x = torch.randn(*shape, 4, TINY.hidden_size).bfloat16().float()
    before, weight, a = torch.rand(*shape, 4), torch.rand(TINY.hidden_size), module.arithmetic
    assert torch.equal(module(x, before, weight)[0], a.ops.collapse(x, before, weight, TINY.rms_norm_eps, a))


class Stored:
    """A checkpoint's three tensors of one sublayer."""

    def __init__(self, **tensors: Tensor):
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def test_the_three_scales_belong_to_pre_post_and_comb() -> None:
    module = connection(2, 20, "torch")
    stored = Stored(hc_attn_fn=module.fn.clone(), hc_attn_base=torch.arange(8.0), hc_attn_scale=torch.tensor([1.0, 2.0, 3.0]))
    module.load(stored, "hc_attn")
    assert module.scale.tolist() == [1, 1, 2, 2, 3, 3, 3, 3]
    assert module.base.tolist() == list(range(8))


@KERNELS
@BATCH
@pytest.mark.parametrize("hc", [1, 2, 4, 5])
def test_collapse_is_the_weighted_sum_then_the_norm(hc: int, shape: tuple[int, int], kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    x, pre, weight = torch.randn(*shape, hc, 64), torch.rand(*shape, hc), torch.rand(64) + 0.5
    total = (x.double() * pre.double().unsqueeze(-1)).sum(-2)
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-20).rsqrt() * weight.double()
    torch.testing.assert_close(a.ops.collapse(x, pre, weight, 1e-20, a).double(), expected, rtol=2e-6, atol=2e-6)


@KERNELS
@BATCH
@pytest.mark.parametrize("hc", [1, 2, 4, 5])
def test_expand_sums_over_from_with_an_asymmetric_comb(hc: int, shape: tuple[int, int], kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    y, residual, post = torch.randn(*shape, 64), torch.randn(*shape, hc, 64), torch.rand(*shape, hc)
    comb = torch.rand(*shape, hc, hc)
    expected = post.double().unsqueeze(-1) * y.double().unsqueeze(-2)
    for source in range(hc):
        for to in range(hc):
            expected[..., to, :] += comb[..., source, to, None].double() * residual[..., source, :].double()
    torch.testing.assert_close(a.ops.expand(y, residual, post, comb, a).double(), expected, rtol=1e-6, atol=2e-6)


@KERNELS
@pytest.mark.parametrize(("source", "to"), [(0, 3), (3, 0), (1, 2), (2, 2)])
def test_one_coefficient_carries_one_stream_to_another(source: int, to: int, kernels: str) -> None:
    a = arithmetic("release", kernels)
    residual = torch.randn(1, 1, 4, 32).bfloat16().float()
    comb = torch.zeros(1, 1, 4, 4)
    comb[0, 0, source, to] = 1.0
    found = a.ops.expand(torch.zeros(1, 1, 32), residual, torch.zeros(1, 1, 4), comb, a)
    expected = torch.zeros(4, 32)
    expected[to] = residual[0, 0, source]
    assert torch.equal(found[0, 0], expected)


@KERNELS
def test_streams_are_rounded_once(kernels: str) -> None:
    """1 + 2^-9 + 2^-9 rounds up to 1 + 2^-7 in bf16 only if both halves are added before the rounding."""
    a = arithmetic("release", kernels)
    residual = torch.ones(1, 1, 1, 32)
    post, comb = torch.full((1, 1, 1), 2.0**-8), torch.full((1, 1, 1, 1), 1.0 + 2.0**-9)
    found = a.ops.expand(torch.ones(1, 1, 32), residual, post, comb, a)
    assert (found == 1.0 + 2.0**-7).all()
