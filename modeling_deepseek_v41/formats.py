# SPDX-License-Identifier: Apache-2.0
"""The low-bit number formats of the release: decoding of stored bytes and quantise-dequantise (QDQ) of activations.

Source: docs/model.md, section 1. Everything is exact fp32 arithmetic on bit patterns, so it is the same on every device.
"""

import torch
from torch import Tensor

EXPONENT = 0x7F800000
MANTISSA_BITS = 23
FP8_MAX, FP4_MAX = 448.0, 6.0
FP8_FLOOR, FP4_FLOOR, COMPRESSED_FLOOR = 1e-4, 6.0 * 2.0**-126, 6.0 * 2.0**-9
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

FP4_PAIRS = torch.tensor([[FP4_VALUES[b & 15], FP4_VALUES[b >> 4]] for b in range(256)], dtype=torch.float32)
"""The two values of every packed byte."""


def decode_ue8m0(scale: Tensor) -> Tensor:
    """ue8m0 bytes (uint8, any shape) to fp32 powers of two: byte b is 2^(b-127), b = 0 the subnormal 2^-127.

    Byte 255 is NaN; the checkpoint reader refuses it before it comes here.
    """
    bits = scale.to(torch.int32) << MANTISSA_BITS
    return bits.masked_fill(scale == 0, 1 << (MANTISSA_BITS - 1)).view(torch.float32)


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
    return groups.view(packed.shape[0], -1).to(dtype)


def decode_fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Table rows [n, k] (e4m3fn) with one ue8m0 scale per 32 columns [n, k/32] (uint8) to fp32 [n, k]; exact."""
    groups = weight.float().view(*scale.shape, 32) * decode_ue8m0(scale).unsqueeze(-1)
    return groups.view(weight.shape)


def round_to_grid(x: Tensor, mantissa_bits: int, lowest: Tensor | int) -> Tensor:
    """Rounds fp32 ``x`` to nearest even with ``mantissa_bits`` fraction bits.

    ``lowest`` is the fp32 exponent field (int32, in place) below which the spacing stays constant, as it does for a
    format's subnormals. Adding and subtracting 1.5 * 2^(e + 23 - mantissa_bits) leaves exactly the bits that are kept.
    """
    exponent = x.view(torch.int32).bitwise_and(EXPONENT)
    exponent = exponent.clamp_min(lowest) if isinstance(lowest, int) else torch.maximum(exponent, lowest)
    shift = ((MANTISSA_BITS - mantissa_bits) << MANTISSA_BITS) + (1 << (MANTISSA_BITS - 1))
    magic = exponent.add_(shift).view(torch.float32)
    return (x + magic).sub_(magic)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (-1, size))


def _power_of_two_scale(groups: Tensor, floor: float, largest: float, below: int = 0) -> Tensor:
    """The int32 bit pattern of 2^-below * s, with s = 2^ceil(log2(amax / largest)), [..., 1] per group."""
    ratio = groups.abs().amax(-1, keepdim=True).clamp_min_(floor).mul_(1.0 / largest)
    return ratio.view(torch.int32).add_(((1 - below) << MANTISSA_BITS) - 1).bitwise_and_(EXPONENT)


def qdq_fp8(x: Tensor) -> Tensor:
    """Activation QDQ [..., k], k a multiple of 32: per 32 values, s = 2^ceil(log2(max(amax, 1e-4) / 448)), e4m3fn(x/s) * s.

    Returns fp32 values, each exact in bf16. Since s is a power of two, x is rounded in place on s's grid, with e4m3's
    smallest normal exponent -6; |x/s| <= 448 by construction, so nothing saturates.
    """
    groups = _groups(x, 32)
    return round_to_grid(groups, 3, _power_of_two_scale(groups, FP8_FLOOR, FP8_MAX, below=6)).flatten(-2)


def qdq_fp4_ue8m0(x: Tensor) -> Tensor:
    """QDQ of index keys and queries [..., k]: per 32 values, s = 2^ceil(log2(max(amax, 6*2^-126) / 6)), e2m1(x/s) * s, fp32."""
    groups = _groups(x, 32)
    return round_to_grid(groups, 1, _power_of_two_scale(groups, FP4_FLOOR, FP4_MAX)).flatten(-2)


def qdq_fp4_e4m3(x: Tensor) -> Tensor:
    """QDQ of compressed KV [..., k]: per 16, s = e4m3fn(max(amax, 6*2^-9) / 6), e2m1(x/s) clamped to 6, times s, fp32."""
    groups = _groups(x, 16)
    ratio = groups.abs().amax(-1, keepdim=True).clamp_min_(COMPRESSED_FLOOR).div_(FP4_MAX)
    scale = round_to_grid(ratio, 3, (127 - 6) << MANTISSA_BITS).clamp_max_(FP8_MAX)
    values = round_to_grid(groups / scale, 1, 127 << MANTISSA_BITS).clamp_(-FP4_MAX, FP4_MAX)
    return values.mul_(scale).flatten(-2)
