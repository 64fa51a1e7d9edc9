# SPDX-License-Identifier: Apache-2.0
"""The caches' QDQ in groups of 32 with power-of-two scales: e2m1 for index keys and queries, e4m3fn for window KV in fp32."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP
from .groups import passes
from .rounding import AMAX_FLOOR, EXPONENT32, round_to_grid

MAGNITUDE32 = 0x7FFFFFFF
FP8 = (AMAX_FLOOR, 448.0, 2.0**-6, 1.5 * 2.0**20)
FP4 = (6.0 * 2.0**-126, 6.0, 1.0, 1.5 * 2.0**22)
"""Of a format: the least amax, its largest value, its least normal one, and what rounds to its fraction bits."""


@nki.jit
def group_qdq(x: nl.NkiTensor, fp4: bool) -> nl.NkiTensor:
    """x with each group of 32 columns rounded to e2m1 (``fp4``) or e4m3fn values times a power of two, to the bit.

    Dimensions:
        M: rows. K: columns, a multiple of 32. L = M K / 32: groups; two cores take half of them each.

    Args:
        x [M, K] fp32 @ HBM, below 2^104. fp4: the format.

    Returns:
        [M, K] fp32 @ HBM, each value exact in bf16.

    Notes:
        Reference: formats.qdq_fp4_ue8m0 and formats.qdq_fp8. ``activation_qdq`` is the quicker one where the values are bf16
        and the format is e4m3fn: its scale's exponent, found by one multiplication, is exact for bf16 amax only.

    Pseudocode:
        per group:  r = max(max|x|, least) / largest;  p = exponent of r;  s = p or, where r > p, 2 p
        per value:  m = magic * max(exponent of x, s * least normal);  out = (x + m) - m

    Cost:
        Per block of up to 64 groups per partition: 2 dma_copy, 11 VectorE instructions. Predicted for 6 x 32 rows of
        128 (index queries), two cores: 6.7 us, of which 4 us are the latency of load and store.
    """
    rows, columns = x.shape
    assert x.dtype == nl.float32, f"x: expected float32, found {x.dtype}"
    assert columns % GROUP == 0, f"x [{rows}, {columns}]: the columns are no multiple of {GROUP}"
    out = nl.ndarray((rows, columns), nl.float32, buffer=nl.shared_hbm)
    for target, source in passes(out, x, GROUP):
        qdq_block(target, source, FP4 if fp4 else FP8)
    return out


def qdq_block(target: nl.NkiTensor, source: nl.NkiTensor, kind: tuple[float, float, float, float]) -> None:
    """QDQ of [P, groups, 32] fp32 @ HBM in one pass."""
    least, largest, normal, magic = kind
    x_sb = nl.ndarray(source.shape, nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=source)
    work_sb = nl.ndarray(x_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=work_sb.view(nl.int32), data=x_sb.view(nl.int32), op0=nl.bitwise_and, operand0=MAGNITUDE32)
    ratio_sb = nl.ndarray(x_sb.shape[:2], nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=ratio_sb, op=nl.maximum, data=work_sb, axis=2)
    nisa.tensor_scalar(dst=ratio_sb, data=ratio_sb, op0=nl.maximum, operand0=least, op1=nl.multiply, operand1=1.0 / largest)
    power_sb = nl.ndarray(ratio_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=power_sb.view(nl.int32), data=ratio_sb.view(nl.int32), op0=nl.bitwise_and, operand0=EXPONENT32)
    nisa.tensor_tensor(dst=ratio_sb, data1=ratio_sb, data2=power_sb, op=nl.greater)
    nisa.scalar_tensor_tensor(dst=power_sb, data=ratio_sb, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=power_sb)
    nisa.tensor_scalar(dst=power_sb, data=power_sb, op0=nl.multiply, operand0=normal)
    total_sb = nl.ndarray(x_sb.shape, nl.float32, buffer=nl.sbuf)
    floor = power_sb.expand_dim(2).broadcast(2, GROUP)
    round_to_grid(x_sb, x_sb, floor, work_sb, work_sb, total_sb, magic)
    nisa.dma_copy(dst=target, src=x_sb)
