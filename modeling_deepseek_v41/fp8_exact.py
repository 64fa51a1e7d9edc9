# SPDX-License-Identifier: Apache-2.0
"""Expert weights from fp4 with group scales to fp8 with one scale per row, no value changed (docs/kernels.md, section 4).

Trainium2 multiplies its own fp8, e4m3 with exponent bias 7, infinities and a largest value of 240, straight from memory, and
knows no group scales. An fp4 value times a power of two is such an fp8 value while it stays among its normal numbers, so a
row whose values span few enough binades keeps its bits: weight = fp8 code x 2^base. Rows that span more are told apart and
stay in bf16, which holds every fp4 weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .formats import FP4_PAIRS

LARGEST_EXPONENT = 7
"""e4m3 of Trainium2 ends at 240 = 1.875 * 2^7."""
LEAST_EXPONENT = -6
"""Its smallest normal number is 2^-6; whether the tensor engine keeps smaller ones is not documented."""
LARGEST_BASE, LEAST_BASE = 127, -126
"""Row scales are normal fp32 powers of two."""

_EMPTY = 1 << 20


class ExactRows(NamedTuple):
    """``reencode``'s result for a weight [n, k]."""

    codes: Tensor
    """[n, k] uint8, the bits of Trainium2's e4m3; zeros in rows that are not exact."""
    base: Tensor
    """[n] int16: the row's scale is 2^base; 0 in rows without a value and in rows that are not exact."""
    exact: Tensor
    """[n] bool: codes x 2^base is the fp4 weight, to the bit, the sign of zero included."""


def reencode(packed: Tensor, scale: Tensor) -> ExactRows:
    """Packed fp4 [n, k/2] (uint8, low nibble = even column) with ue8m0 scales [n, k/32] (uint8, below 255) to fp8 rows.

    Of the bases that a row allows, the one nearest to its largest value is taken, so that the same weight always gets the
    same bytes. Host code for loading: shapes are static, nothing else is.
    """
    n, k = packed.shape[0], 2 * packed.shape[1]
    values = FP4_PAIRS[packed.to(torch.int64)].view(n, k)
    mantissa, exponent = torch.frexp(values)
    exponent = exponent.to(torch.int32) - 1
    exponent = exponent + (scale.to(torch.int32) - 127).repeat_interleave(32, 1)
    some = values != 0
    highest = exponent.masked_fill(~some, -_EMPTY).amax(1)
    lowest = exponent.masked_fill(~some, _EMPTY).amin(1)
    base = (highest - LARGEST_EXPONENT).clamp(LEAST_BASE, LARGEST_BASE)
    exact = (lowest - base >= LEAST_EXPONENT) & (highest - base <= LARGEST_EXPONENT)
    zeros = ~some.any(1)
    base = base.masked_fill(zeros | ~exact, 0)
    exact |= zeros
    field = (exponent - base[:, None] + 7) << 3
    fraction = (mantissa.abs() * 16 - 8).to(torch.int32)
    bits = torch.where(some, field | fraction, 0) | (values.signbit().to(torch.int32) << 7)
    return ExactRows(bits.masked_fill(~exact[:, None], 0).to(torch.uint8), base.to(torch.int16), exact)


def decode_codes(codes: Tensor) -> Tensor:
    """Bits of Trainium2's e4m3 (uint8, any shape, finite) to fp32: the values that its tensor engine multiplies."""
    bits = codes.to(torch.int32)
    field, fraction = (bits >> 3) & 15, (bits & 7).float()
    normal = torch.ldexp(1 + fraction / 8, field - 7)
    value = torch.where(field == 0, fraction * 2.0**-9, normal)
    return torch.where(bits >= 128, -value, value)


_VALUES = decode_codes(torch.arange(256, dtype=torch.uint8))


def decode_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [n, k] uint8, finite, times their rows' ``scale`` [n], powers of two: fp32 [n, k], exact."""
    return _VALUES.to(codes.device)[codes.to(torch.int32)].mul_(scale.float().unsqueeze(1))
