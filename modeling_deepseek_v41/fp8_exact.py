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

_EMPTY = 1 << 12
_SHIFT = 8
"""A group's power of two is at most so far from its row's where the row is exact."""


def _tables() -> tuple[Tensor, Tensor, Tensor]:
    """For every byte of two fp4 values: their highest and lowest exponent int16 [256], beyond any where both are zero; and
    the two fp8 codes of the values times 2^(s - _SHIFT), int16 [s, 256], low byte first."""
    mantissa, exponent = torch.frexp(FP4_PAIRS)
    exponent, some = exponent.to(torch.int16) - 1, FP4_PAIRS != 0
    highest, lowest = exponent.masked_fill(~some, -_EMPTY).amax(1), exponent.masked_fill(~some, _EMPTY).amin(1)
    field = exponent + torch.arange(7 - _SHIFT, 8 + _SHIFT, dtype=torch.int16).view(-1, 1, 1)
    fraction = (mantissa.abs() * 16 - 8).to(torch.int16)
    code = torch.where(some, field.clamp(0, 15) << 3 | fraction, 0) | FP4_PAIRS.signbit().to(torch.int16) << 7
    return highest, lowest, code[..., 0] | code[..., 1] << 8


_HIGHEST, _LOWEST, _CODES = _tables()


class ExactRows(NamedTuple):
    """``reencode``'s result for a weight [n, k]."""

    codes: Tensor
    """[n, k] uint8, the bits of Trainium2's e4m3; zeros in rows that are not exact."""
    base: Tensor
    """[n] int16: the row's scale is 2^base; 0 in rows without a value and in rows that are not exact."""
    exact: Tensor
    """[n] bool: codes x 2^base is the fp4 weight, to the bit, the sign of zero included."""

    @property
    def scale(self) -> Tensor:
        """2^base as fp32 [n]."""
        return torch.ldexp(torch.ones(len(self.base)), self.base)


def reencode(packed: Tensor, scale: Tensor) -> ExactRows:
    """Packed fp4 [n, k/2] (uint8, low nibble = even column) with ue8m0 scales [n, k/32] (uint8, below 255) to fp8 rows.

    Of the bases that a row allows, the one nearest to its largest value is taken, so that the same weight always gets the
    same bytes. Host code for loading: shapes are static, nothing else is.
    """
    n, groups = scale.shape
    pairs = packed.view(n, groups, -1).to(torch.int32)
    power = scale.to(torch.int32) - 127
    highest = (_HIGHEST[pairs].amax(-1) + power).amax(1)
    lowest = (_LOWEST[pairs].amin(-1) + power).amin(1)
    base = (highest - LARGEST_EXPONENT).clamp(LEAST_BASE, LARGEST_BASE)
    exact = (lowest - base >= LEAST_EXPONENT) & (highest - base <= LARGEST_EXPONENT)
    zeros = highest < lowest
    base = base.masked_fill(zeros | ~exact, 0)
    exact |= zeros
    shift = (power - base.unsqueeze(1)).clamp(-_SHIFT, _SHIFT) + _SHIFT
    codes = _CODES.view(-1)[(shift << 8).unsqueeze(-1) + pairs].view(n, -1).view(torch.uint8)
    return ExactRows(codes.masked_fill_(~exact.unsqueeze(1), 0), base.to(torch.int16), exact)


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
