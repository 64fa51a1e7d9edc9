# SPDX-License-Identifier: Apache-2.0
"""The residual streams around a sublayer (docs/model.md, section 3), differentiable."""

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.kernels.dispatch import TORCH
from modeling_deepseek_v41.linear import rms_norm, rms_scale
from modeling_deepseek_v41.numerics import NUMERICS, Arithmetic

from .weights import Weights

FP32 = Arithmetic(
    dtype=NUMERICS["fp32_no_qdq"].dtype, quantize_activations=False, quantize_cache=False, ops=TORCH, exact_tokens=0
)
"""What the package's functions are given here: they round nothing."""


def norm(x: Tensor, w: Weights, name: str, config: ModelConfig) -> Tensor:
    """RMSNorm of x [..., d] with the weight ``name``."""
    return rms_norm(x, w[name], config.rms_norm_eps, FP32)


def mixes(x: Tensor, w: Weights, name: str, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Streams x [B, T, hc, d] to what the sublayer ``name`` makes of them: pre [B, T, hc] and mix [B, T, hc, hc + 1].

    Row j of ``mix`` makes stream j: comb[i, j] of each stream i before the sublayer, then post[j] of its output. The many
    small divisions run on [hc, hc, B, T], where the rows of memory are long: five times as fast as the package's form.
    """
    hc, eps = config.hc_mult, config.hc_eps
    flat = x.flatten(-2)
    scale = w[f"{name}_scale"].repeat_interleave(torch.tensor([hc, hc, hc * hc]))
    logits = F.linear(flat, w[f"{name}_fn"]) * rms_scale(flat, config.rms_norm_eps) * scale + w[f"{name}_base"]
    gates = torch.sigmoid(logits[..., : 2 * hc])
    comb = logits[..., 2 * hc :].unflatten(-1, (hc, hc)).permute(2, 3, 0, 1).contiguous().softmax(1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    mix = torch.cat([comb.permute(2, 3, 1, 0), 2 * gates[..., hc:].unsqueeze(-1)], -1).contiguous()
    return gates[..., :hc] + eps, mix


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """The mix of the streams x [B, T, hc, d] that a sublayer reads: [B, T, d]."""
    return torch.matmul(pre.unsqueeze(-2), x).squeeze(-2)


def expand(y: Tensor, residual: Tensor, mix: Tensor) -> Tensor:
    """The streams [B, T, hc, d] after a sublayer's output y [B, T, d]."""
    return torch.matmul(mix, torch.cat([residual, y.unsqueeze(-2)], -2))
