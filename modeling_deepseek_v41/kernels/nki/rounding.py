# SPDX-License-Identifier: Apache-2.0
"""On the device: rounding to e4m3fn with power-of-two scales, which trn2 has no cast for, by fp32 sums (formats.qdq_fp8)."""

import nki.isa as nisa
import nki.language as nl

AMAX_FLOOR = 1e-4
FLOOR_FACTOR = (2.0 - 2.0**-23) / 448.0 / 64.0
"""Times amax, the exponent alone of the product is 2^-6 s, s = 2^ceil(log2(amax / 448)): just below 2 turns floor into ceil.
That this equals the reference for every finite bf16 amax is a test over all of them."""
MAGIC = 1.5 * 2.0**20
"""x + MAGIC 2^e has its last bit at 2^(e-3): adding and subtracting it keeps e4m3's 3 fraction bits, to nearest even."""
EXPONENT32, EXPONENT16, MAGNITUDE16 = 0x7F800000, 0x7F80, 0x7FFF


def magnitude(dst: nl.NkiTensor, x: nl.NkiTensor) -> None:
    """dst = |x|, both bf16, any shape: 1 VectorE instruction."""
    nisa.tensor_scalar(dst=dst.view(nl.int16), data=x.view(nl.int16), op0=nl.bitwise_and, operand0=MAGNITUDE16)


def grid_floor(dst: nl.NkiTensor, amax: nl.NkiTensor, shrink: float = 1.0) -> None:
    """dst = shrink * 2^-6 * s, the least exponent that a group's values are rounded at: 2 VectorE instructions.

    dst and amax [P, groups] fp32 @ SBUF; amax holds bf16 values; ``shrink`` is a power of two.
    """
    nisa.tensor_scalar(dst=dst, data=amax, op0=nl.maximum, operand0=AMAX_FLOOR, op1=nl.multiply, operand1=FLOOR_FACTOR * shrink)
    bits = dst.view(nl.int32)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.bitwise_and, operand0=EXPONENT32)


def round_to_grid(
    dst: nl.NkiTensor, x: nl.NkiTensor, floor: nl.NkiTensor, power: nl.NkiTensor, exponent: nl.NkiTensor, total: nl.NkiTensor,
    magic: float = MAGIC,
) -> None:  # fmt: skip
    """dst = x rounded at max(x's exponent, floor), to the fraction bits of ``magic``: 4 VectorE instructions, zeros positive.

    All of one shape. x bf16 or fp32, |x| below 2^107; floor fp32, in SBUF or PSUM; work tiles @ SBUF: ``power`` of x's dtype,
    ``exponent`` and ``total`` fp32.
    """
    bits, mask = (nl.int16, EXPONENT16) if x.dtype == nl.bfloat16 else (nl.int32, EXPONENT32)
    nisa.tensor_scalar(dst=power.view(bits), data=x.view(bits), op0=nl.bitwise_and, operand0=mask)
    nisa.tensor_tensor(dst=exponent, data1=power, data2=floor, op=nl.maximum)
    nisa.scalar_tensor_tensor(dst=total, data=exponent, op0=nl.multiply, operand0=magic, op1=nl.add, operand1=x)
    nisa.scalar_tensor_tensor(dst=dst, data=exponent, op0=nl.multiply, operand0=-magic, op1=nl.add, operand1=total)
