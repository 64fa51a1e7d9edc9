# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of the last columns, adjacent pairs as complex numbers (docs/model.md, section 4)."""

import math

import torch
from torch import Tensor

from .config import ModelConfig, RopeScaling
from .numerics import Arithmetic


def frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """The angle per position of each of the dim/2 pairs, fp32; with ``scaling``, YaRN's blend of theta^(-2i/dim)."""
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return inverse

    def boundary(rotations: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(boundary(scaling.beta_fast)), 0)
    high = min(math.ceil(boundary(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)


def rope_table(config: ModelConfig, compressed: bool, positions: int) -> Tensor:
    """Rotary factors of every position, [positions, 2, qk_rope_head_dim] fp32, for ``rotate``.

    Row 0 holds cos, row 1 sin, for both elements of each pair; sin is negative at the even one. ``compressed`` chooses the
    family of layers with a ratio above 0 (compress_rope_theta, YaRN), else rope_theta without scaling.
    """
    theta = config.compress_rope_theta if compressed else config.rope_theta
    inverse = frequencies(config.qk_rope_head_dim, theta, config.rope_scaling if compressed else None)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cos, cos], -1).flatten(1), torch.stack([-sin, sin], -1).flatten(1)], 1)


def rotate(x: Tensor, table: Tensor, arithmetic: Arithmetic, back: bool = False) -> Tensor:
    """Rotates the last R columns of x [B, T, (heads,) D] by ``table`` [B, T, 2, R], or back by its conjugate.

    (a + bi)(cos + i sin) = (a cos - b sin) + (b cos + a sin) i on adjacent pairs, rounded.
    """
    if x.dim() == 4:
        table = table.unsqueeze(2)
    cos, sin = table.unbind(-2)
    plain, pairs = x.split([x.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
    swapped = pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = torch.addcmul(pairs * cos, swapped, sin, value=-1 if back else 1)
    return torch.cat([plain, arithmetic.round(turned)], -1)


def rotate_and_quantise(x: Tensor, table: Tensor, form: str, arithmetic: Arithmetic) -> Tensor:
    """``rotate``, then the QDQ ``form``: fp8 of window KV, fp4_e4m3 of compressed KV, fp4_ue8m0 of index keys, queries."""
    ops, turned = arithmetic.ops, arithmetic.ops.rotate(x, table, arithmetic)
    if form == "fp8":
        return ops.quantise(turned, arithmetic)
    return ops.quantise_index(turned) if form == "fp4_ue8m0" else ops.quantise_compressed(turned)
