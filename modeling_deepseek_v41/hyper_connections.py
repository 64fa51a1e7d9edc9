# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC): the residual is hc streams, mixed around every sublayer.

Source: docs/model.md, section 3. All coefficients are fp32; ``comb`` is indexed [from, to].
"""

import torch
from torch import Tensor, nn

from .checkpoint.rank import Source
from .config import ModelConfig
from .linear import fill, frozen, rms_norm, rms_scale, sigmoid
from .numerics import Arithmetic
from .rows import by_rows


class HyperConnection(nn.Module):
    """What stands before one sublayer: its mixing coefficients, computed from the streams, and its input."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic):
        super().__init__()
        self.hc, self.eps, self.norm_eps = config.hc_mult, config.hc_eps, config.rms_norm_eps
        self.rounds, self.arithmetic = config.hc_sinkhorn_iters - 1, arithmetic
        count = (2 + self.hc) * self.hc
        self.fn = frozen(count, self.hc * config.hidden_size)
        self.base = frozen(count)
        self.scale = frozen(count)

    def forward(self, x: Tensor, pre_mix: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``sublayer_input`` of the streams x, the previous sublayer's pre and the weight of the sublayer's norm."""
        weights, constants = (self.fn, self.scale, self.base, weight), (self.rounds, self.eps, self.norm_eps)
        return self.arithmetic.ops.sublayer_input(x, pre_mix, *weights, *constants, self.arithmetic)

    def load(self, checkpoint: Source, name: str) -> None:
        """Reads ``name``_fn, _base and _scale [3], the last spread over the mixes that it scales."""
        spread = torch.tensor([self.hc, self.hc, self.hc * self.hc])
        fill(self, "fn", checkpoint.tensor(f"{name}_fn").clone())
        fill(self, "base", checkpoint.tensor(f"{name}_base").clone())
        scale = checkpoint.tensor(f"{name}_scale")
        fill(self, "scale", scale.repeat_interleave(spread, output_size=self.scale.shape[0]))


def sublayer_input(
    x: Tensor, pre_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, rounds: int, eps: float,
    norm_eps: float, arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """h, the collapse of the streams x [B, T, hc, d] with the previous sublayer's pre_mix [B, T, hc], and x's own mixes.

    fn [(2 + hc) * hc, hc * d], scale and base like its rows, weight [d] of the sublayer's norm. Returns h [B, T, d], pre and
    post [B, T, hc] and comb [B, T, hc, hc] (``mixes``); all fp32, h rounded.
    """
    ops = arithmetic.ops
    raw = ops.linear(x.flatten(-2), fn, False, arithmetic)
    pre, post, comb = ops.mixes(raw, x, scale, base, rounds, eps, norm_eps, arithmetic)
    return ops.collapse(x, pre_mix, weight, norm_eps, arithmetic), pre, post, comb


def mixes(
    raw: Tensor, x: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float, norm_eps: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post and comb from raw = flatten(x) fn^T [B, T, (2 + hc) * hc]; x [B, T, hc, d], scale and base like raw's last.

    ``rounds``: of row and column normalisation after the first column one.
    """
    hc = x.shape[-2]
    logits = torch.addcmul(base, raw * rms_scale(x.flatten(-2), norm_eps), scale)
    gates = sigmoid(logits[..., : 2 * hc])
    comb = logits[..., 2 * hc :].unflatten(-1, (hc, hc))
    return gates[..., :hc] + eps, 2 * gates[..., hc:], sinkhorn(comb, rounds, eps)


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """softmax over the last axis + eps, a column normalisation, then ``rounds`` row and column ones; [..., hc, hc] fp32.

    A normalisation divides by (sum + eps).
    """
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(x: Tensor, pre: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    """The sublayer's input: RMSNorm, with ``weight`` [d], of the sum over streams of pre [B, T, hc] times x [B, T, hc, d].

    Both are rounded: [B, T, d] fp32.
    """
    return rms_norm(weighted_sum(x, pre, arithmetic), weight, eps, arithmetic)


def weighted_sum(x: Tensor, pre: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The collapse without a norm: the sum over streams of pre [B, T, hc] times x [B, T, hc, d], rounded: [B, T, d] fp32."""

    def mix(x: Tensor, pre: Tensor) -> Tensor:
        return torch.matmul(pre.unsqueeze(-2), x).squeeze(-2)

    return arithmetic.round(by_rows(mix, arithmetic.exact_tokens, x, pre))


def expand(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The streams after a sublayer: stream j is post[j] * y + sum over i of comb[i, j] * residual[i], rounded.

    y [B, T, d], residual [B, T, hc, d], post [B, T, hc], comb [B, T, hc, hc] to [B, T, hc, d], all fp32.
    """

    def mix(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return torch.matmul(comb.mT, residual).addcmul_(post.unsqueeze(-1), y.unsqueeze(-2))

    return arithmetic.round(by_rows(mix, arithmetic.exact_tokens, y, residual, post, comb))
