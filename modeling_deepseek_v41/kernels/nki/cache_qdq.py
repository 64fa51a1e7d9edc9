# SPDX-License-Identifier: Apache-2.0
"""The QDQ of index keys and queries, and of compressed KV, as kernels: e2m1 values times a scale per group."""

import nki
import nki.isa as nisa
import nki.language as nl

from .groups import passes
from .rounding import EXPONENT32, magnitude, round_to_grid

INDEX_GROUP, COMPRESSED_GROUP = 32, 16
LARGEST = 6.0
"""Of e2m1."""
INDEX_FLOOR = 6.0 * 2.0**-126
INDEX_FACTOR = (2.0 - 2.0**-11) / 6.0
"""Times amax, the exponent alone of the product is 2^ceil(log2(amax / 6)): a bf16 amax that is not 6 times a power of two is
2^-8 away from one."""
COMPRESSED_FLOOR, SIXTH = 6.0 * 2.0**-9, 1.0 / 6.0
"""amax times fp32's sixth, rounded to e4m3, is amax / 6 rounded: a test over all bf16 amax."""
LEAST_E4M3, LARGEST_E4M3 = 2.0**-6, 448.0
MAGIC_FP4 = 1.5 * 2.0**22
"""Leaves one fraction bit, as rounding.MAGIC leaves three."""
SNAP = 1.5 * 2.0**12
"""Adding and subtracting it rounds to 2^-11. A bf16 value over an e4m3 scale is a boundary of e2m1 or 2^-10 away from all, so
what a reciprocal is wrong in the last bits goes and nothing else changes."""


@nki.jit
def cache_qdq(x: nl.NkiTensor, form: str) -> nl.NkiTensor:
    """x through the QDQ ``form``: fp4_ue8m0, as index keys and queries are, or fp4_e4m3, as compressed KV is.

    Dimensions:
        M: rows, any number. K: columns, a multiple of 32 for fp4_ue8m0, of 16 for fp4_e4m3. Two cores take half of the groups.

    Args:
        x [M, K] bf16 @ HBM, finite.

    Returns:
        [M, K] bf16 @ shared HBM, exact in bf16.

    Notes:
        formats.qdq_fp4_ue8m0 to the bit below 2^105, where that overflows, and its definition for every finite bf16;
        formats.qdq_fp4_e4m3 to the bit for every finite bf16. ``rotate`` does the same behind the rotation in one pass.

    Pseudocode:
        per group:  s = exponent of (max(amax, 6 * 2^-126) * (2 - 2^-11) / 6)   or   e4m3(max(amax, 6 * 2^-9) / 6)
        per value:  y = x / s;  m = 1.5 * 2^22 * max(exponent of y, 1);  out = ((y + m) - m) * s

    Cost:
        Per block of up to 64 groups per partition: 2 dma_copy and 12 (fp4_ue8m0) or 19 (fp4_e4m3) VectorE instructions. Bound:
        latency. Predicted for 6 rows, two cores: 4 index heads of 128 5.7 us, compressed KV of 512 6.4 us, of which 4 us are
        load and store.
    """
    rows, columns = x.shape
    check_form(x, form)
    group = INDEX_GROUP if form == "fp4_ue8m0" else COMPRESSED_GROUP
    out = nl.ndarray((rows, columns), nl.bfloat16, buffer=nl.shared_hbm)
    for target, source in passes(out, x, group):
        x_sb = nl.ndarray(source.shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_sb, src=source)
        qdq_fp4(x_sb, form)
        nisa.dma_copy(dst=target, src=x_sb)
    return out


def check_form(x: nl.NkiTensor, form: str) -> None:
    """Refuses another dtype than bf16, another form, and columns that are no whole groups."""
    assert x.dtype == nl.bfloat16, f"x: expected bfloat16, found {x.dtype}"
    assert form in ("fp4_ue8m0", "fp4_e4m3"), f"form {form}: expected fp4_ue8m0 or fp4_e4m3"
    group = INDEX_GROUP if form == "fp4_ue8m0" else COMPRESSED_GROUP
    assert x.shape[-1] % group == 0, f"x {x.shape}: the columns are no multiple of {group}"


def qdq_fp4(x_sb: nl.NkiTensor, form: str) -> None:
    """x_sb [P, groups, group] bf16 @ SBUF through the QDQ ``form``, in place."""
    shape = x_sb.shape
    abs_sb = nl.ndarray(shape, nl.bfloat16, buffer=nl.sbuf)
    magnitude(abs_sb, x_sb)
    scale_sb = nl.ndarray(shape[:2], nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=scale_sb, op=nl.maximum, data=abs_sb, axis=2)
    inverse_sb = nl.ndarray(shape[:2], nl.float32, buffer=nl.sbuf)
    y_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    inverse = inverse_sb.expand_dim(2).broadcast(2, shape[2])
    if form == "fp4_ue8m0":
        power_of_two_scale(scale_sb, inverse_sb)
        nisa.scalar_tensor_tensor(dst=y_sb, data=x_sb, op0=nl.multiply, operand0=0.5, op1=nl.multiply, operand1=inverse)
    else:
        e4m3_scale(scale_sb)
        nisa.reciprocal(dst=inverse_sb, data=scale_sb)
        nisa.tensor_tensor(dst=y_sb, data1=x_sb, data2=inverse, op=nl.multiply)
        nisa.tensor_scalar(dst=y_sb, data=y_sb, op0=nl.minimum, operand0=LARGEST, op1=nl.maximum, operand1=-LARGEST)
        nisa.tensor_scalar(dst=y_sb, data=y_sb, op0=nl.add, operand0=SNAP, op1=nl.subtract, operand1=SNAP)
    power_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    one_sb = nl.ones(shape[:2], nl.float32)
    floor = one_sb.expand_dim(2).broadcast(2, shape[2])
    round_to_grid(y_sb, y_sb, floor, power_sb, power_sb, y_sb, MAGIC_FP4)
    scale = scale_sb.expand_dim(2).broadcast(2, shape[2])
    nisa.tensor_tensor(dst=x_sb, data1=y_sb, data2=scale, op=nl.multiply)


def power_of_two_scale(scale_sb: nl.NkiTensor, double_sb: nl.NkiTensor) -> None:
    """scale_sb = 2^ceil(log2(amax / 6)) of the amax in it, and double_sb = 2 / scale_sb, by its exponent's complement."""
    nisa.tensor_scalar(
        dst=scale_sb, data=scale_sb, op0=nl.maximum, operand0=INDEX_FLOOR, op1=nl.multiply, operand1=INDEX_FACTOR
    )
    bits = scale_sb.view(nl.int32)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.bitwise_and, operand0=EXPONENT32)
    nisa.tensor_scalar(dst=double_sb.view(nl.int32), data=bits, op0=nl.bitwise_xor, operand0=EXPONENT32)


def e4m3_scale(scale_sb: nl.NkiTensor) -> None:
    """scale_sb = amax / 6 of the amax in it, rounded to e4m3fn."""
    nisa.tensor_scalar(dst=scale_sb, data=scale_sb, op0=nl.maximum, operand0=COMPRESSED_FLOOR, op1=nl.multiply, operand1=SIXTH)
    nisa.tensor_scalar(dst=scale_sb, data=scale_sb, op0=nl.minimum, operand0=LARGEST_E4M3)
    power_sb = nl.ndarray(scale_sb.shape, nl.float32, buffer=nl.sbuf)
    least_sb = nl.ndarray(scale_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=least_sb, value=LEAST_E4M3)
    round_to_grid(scale_sb, scale_sb, least_sb, power_sb, power_sb, scale_sb)
