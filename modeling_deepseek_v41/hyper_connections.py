# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC): the residual is hc streams, mixed around every sublayer.

Source: docs/model.md, section 3. All of it is fp32; ``comb`` is indexed [from, to]. The streams are fp32 tensors whose
values are rounded to the arithmetic's dtype, so that nothing has to be widened before it is mixed.
"""

import torch
from torch import Tensor, nn

from .checkpoint.reader import Checkpoint
from .config import ModelConfig
from .linear import fill, frozen, rms_scale, sigmoid
from .rows import by_rows, tiled_linear


class HyperConnection(nn.Module):
    """The mixing coefficients of one sublayer, computed from the streams before it."""

    def __init__(self, config: ModelConfig, exact_tokens: int):
        super().__init__()
        self.hc, self.eps, self.norm_eps = config.hc_mult, config.hc_eps, config.rms_norm_eps
        self.rounds, self.exact_tokens = config.hc_sinkhorn_iters - 1, exact_tokens
        mixes = (2 + self.hc) * self.hc
        self.fn = frozen(mixes, self.hc * config.hidden_size)
        self.base = frozen(mixes)
        self.scale = frozen(mixes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams x [B, T, hc, d] to pre [B, T, hc], post [B, T, hc] and comb [B, T, hc, hc], all fp32."""
        flat = x.flatten(-2)
        mixes = tiled_linear(flat, self.fn, self.exact_tokens) * rms_scale(flat, self.norm_eps)
        mixes = torch.addcmul(self.base, mixes, self.scale)
        gates = sigmoid(mixes[..., : 2 * self.hc])
        pre = gates[..., : self.hc] + self.eps
        post = 2 * gates[..., self.hc :]
        comb = mixes[..., 2 * self.hc :].unflatten(-1, (self.hc, self.hc))
        return pre, post, sinkhorn(comb, self.rounds, self.eps)

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Reads ``name``_fn, _base and _scale [3], the last spread over the mixes that it scales."""
        spread = torch.tensor([self.hc, self.hc, self.hc * self.hc])
        fill(self, "fn", checkpoint.tensor(f"{name}_fn").clone())
        fill(self, "base", checkpoint.tensor(f"{name}_base").clone())
        fill(self, "scale", checkpoint.tensor(f"{name}_scale").repeat_interleave(spread))


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """softmax over the last axis + eps, a column normalisation, then ``rounds`` row and column ones; [..., hc, hc] fp32.

    A normalisation divides by (sum + eps). With comb = K / (row * column), each is one product with K: the new column
    divisor is K^T (1/row) + eps * column (docs/model.md, section 3).
    """
    k = (logits.softmax(-1) + eps).view(-1, *logits.shape[-2:])
    k_transposed = k.mT.contiguous()
    row = k.new_ones(k.shape[0], k.shape[1], 1)
    column = torch.baddbmm(row, k_transposed, row, beta=eps)
    for _ in range(rounds):
        row = torch.baddbmm(row, k, column.reciprocal(), beta=eps)
        column = torch.baddbmm(column, k_transposed, row.reciprocal(), beta=eps)
    return (k / (row * column.mT)).view(logits.shape)


def collapse(x: Tensor, pre: Tensor, dtype: torch.dtype, exact_tokens: int) -> Tensor:
    """The sublayer's input: sum over streams of pre [B, T, hc] times x [B, T, hc, d], rounded to ``dtype``: [B, T, d]."""

    def mix(x: Tensor, pre: Tensor) -> Tensor:
        return torch.matmul(pre.unsqueeze(-2), x).squeeze(-2)

    return by_rows(mix, exact_tokens, x, pre).to(dtype)


def expand(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor, exact_tokens: int) -> Tensor:
    """The streams after a sublayer: stream j is post[j] * y + sum over i of comb[i, j] * residual[i], rounded to y's dtype.

    y [B, T, d], residual [B, T, hc, d] fp32, post [B, T, hc], comb [B, T, hc, hc] to [B, T, hc, d] fp32.
    """

    def mix(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        carried = torch.matmul(comb.mT, residual)
        return carried.addcmul_(post.unsqueeze(-1), y.float().unsqueeze(-2))

    return by_rows(mix, exact_tokens, y, residual, post, comb).to(y.dtype).float()
