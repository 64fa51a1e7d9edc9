# SPDX-License-Identifier: Apache-2.0
"""The low-bit number formats of the release: decoding of stored bytes and quantise-dequantise (QDQ) of activations.

Source: docs/model.md, section 1. Everything is exact fp32 arithmetic without bit patterns, which not every device lets a graph
see, so it is the same on every device.
"""

import torch
from torch import Tensor

FRACTION_BITS = 23
"""Of fp32."""
ALL_EXPONENTS = (64, 64, 64, 32, 16, 8, 4, 2, 1)
FP8_EXPONENTS, FP4_EXPONENTS = (8, 4, 2, 1), (2, 1)
"""Steps that reach over the normal exponents of fp32 from -126 on, of e4m3 from -6 on, and of e2m1 from 0 on."""
FP8_MAX, FP4_MAX = 448.0, 6.0
FP8_FLOOR, FP4_FLOOR, COMPRESSED_FLOOR = 1e-4, 6.0 * 2.0**-126, 6.0 * 2.0**-9
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

FP4_PAIRS = torch.tensor([[FP4_VALUES[b & 15], FP4_VALUES[b >> 4]] for b in range(256)], dtype=torch.float32)
"""The two values of every packed byte."""


POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
"""The value of every ue8m0 byte; that of 255, which is NaN, is not used."""


def decode_ue8m0(scale: Tensor) -> Tensor:
    """ue8m0 bytes (uint8, any shape) to fp32 powers of two: byte b is 2^(b-127), b = 0 the subnormal 2^-127.

    Byte 255 is NaN; the checkpoint reader refuses it before it comes here.
    """
    return POWERS.to(scale.device)[scale.long()]


def decode_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, skip: int = 0) -> Tensor:
    """An fp8 weight [n, k] (e4m3fn) with ue8m0 scales [ceil(n/32), ceil(k/32)] (uint8) to ``dtype``; exact in bf16 and fp32.

    ``skip``: how many rows of the first row of scales lie before the weight's first.
    """
    n, k = weight.shape
    wide = decode_ue8m0(scale).repeat_interleave(32, 1)[:, :k]
    return (weight.float() * wide.repeat_interleave(32, 0)[skip : skip + n]).to(dtype)


def decode_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An fp4 weight [n, k/2] (uint8, low nibble = even column) with ue8m0 scales [n, k/32] to ``dtype`` [n, k]; exact."""
    values = FP4_PAIRS.to(packed.device)[packed.to(torch.int64)]
    groups = values.view(*scale.shape, 32) * decode_ue8m0(scale).unsqueeze(-1)
    return groups.flatten(1).to(dtype)


def decode_e4m3(codes: Tensor) -> Tensor:
    """e4m3fn bytes (uint8, any shape) to fp32: sign, 4 bits of exponent and 3 of fraction; exponent 0 is subnormal, 127 NaN."""
    bits = codes.to(torch.int32)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    magnitude = (torch.where(exponent > 0, fraction + 8, fraction) << (exponent.clamp_min(1) - 1)).float() * 2.0**-9
    magnitude = magnitude.masked_fill((bits & 127) == 127, torch.nan)
    return torch.where(bits >= 128, -magnitude, magnitude)


def decode_fp8_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Table rows [n, k] (e4m3fn bytes, uint8) with one ue8m0 scale per 32 columns [n, k/32] (uint8) to fp32 [n, k]; exact."""
    groups = decode_e4m3(codes).view(*scale.shape, 32) * decode_ue8m0(scale).unsqueeze(-1)
    return groups.view(codes.shape)


def power_of_two_below(x: Tensor, lowest: Tensor | float, steps: tuple[int, ...]) -> Tensor:
    """The largest 2^i that is at most x, and at least ``lowest``, itself a power of two; fp32, exact.

    A search by comparison: ``steps`` are exponents that add up to at least the largest one above ``lowest``.
    """
    power = torch.full_like(x, lowest) if isinstance(lowest, float) else lowest.expand(x.shape)
    for step in steps:
        higher = power * 2.0**step
        power = torch.where(x >= higher, higher, power)
    return power


def round_to_grid(x: Tensor, mantissa_bits: int, lowest: Tensor | float, steps: tuple[int, ...]) -> Tensor:
    """Rounds fp32 ``x`` to nearest even with ``mantissa_bits`` fraction bits.

    ``lowest`` is the power of two below which the spacing stays constant, as it does for a format's subnormals, and ``steps``
    reach from there to the largest of x. Adding and subtracting 1.5 * 2^(e + 23 - mantissa_bits) leaves exactly the bits that
    are kept.
    """
    magic = power_of_two_below(x.abs(), lowest, steps) * (1.5 * 2.0 ** (FRACTION_BITS - mantissa_bits))
    return (x + magic).sub_(magic)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (-1, size))


def _power_of_two_scale(groups: Tensor, floor: float, largest: float) -> Tensor:
    """s = 2^ceil(log2(amax / largest)) as fp32 [..., 1] per group."""
    ratio = groups.abs().amax(-1, keepdim=True).clamp_min_(floor).mul_(1.0 / largest)
    below = power_of_two_below(ratio, 2.0**-126, ALL_EXPONENTS)
    return torch.where(ratio > below, below * 2, below)


def qdq_fp8(x: Tensor) -> Tensor:
    """Activation QDQ [..., k], k a multiple of 32: per 32 values, s = 2^ceil(log2(max(amax, 1e-4) / 448)), e4m3fn(x/s) * s.

    Returns fp32 values, each exact in bf16. Since s is a power of two, x is rounded in place on s's grid, with e4m3's
    smallest normal exponent -6; |x/s| <= 448 by construction, so nothing saturates.
    """
    groups = _groups(x, 32)
    scale = _power_of_two_scale(groups, FP8_FLOOR, FP8_MAX)
    return round_to_grid(groups, 3, scale * 2.0**-6, FP8_EXPONENTS).flatten(-2)


def qdq_fp4_ue8m0(x: Tensor) -> Tensor:
    """QDQ of index keys and queries [..., k]: per 32 values, s = 2^ceil(log2(max(amax, 6*2^-126) / 6)), e2m1(x/s) * s, fp32."""
    groups = _groups(x, 32)
    return round_to_grid(groups, 1, _power_of_two_scale(groups, FP4_FLOOR, FP4_MAX), FP4_EXPONENTS).flatten(-2)


def qdq_fp4_e4m3(x: Tensor) -> Tensor:
    """QDQ of compressed KV [..., k]: per 16, s = e4m3fn(max(amax, 6*2^-9) / 6), e2m1(x/s) clamped to 6, times s, fp32."""
    groups = _groups(x, 16)
    ratio = groups.abs().amax(-1, keepdim=True).clamp_min_(COMPRESSED_FLOOR).div_(FP4_MAX)
    scale = round_to_grid(ratio, 3, 2.0**-6, FP8_EXPONENTS).clamp_max_(FP8_MAX)
    values = round_to_grid(groups / scale, 1, 1.0, FP4_EXPONENTS).clamp_(-FP4_MAX, FP4_MAX)
    return values.mul_(scale).flatten(-2)
