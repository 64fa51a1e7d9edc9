# SPDX-License-Identifier: Apache-2.0
"""The QDQ of compressed KV: groups of 16 columns rounded to e2m1 values times e4m3fn scales."""

import nki
import nki.isa as nisa
import nki.language as nl

from .group_qdq import MAGNITUDE32
from .groups import passes
from .rounding import round_to_grid

GROUP = 16
LEAST_AMAX, LARGEST, LARGEST_SCALE, LEAST_NORMAL = 6.0 * 2.0**-9, 6.0, 448.0, 2.0**-6
STEPS = (
    (0.25, nl.greater, 0.5), (0.75, nl.greater_equal, 0.5), (1.25, nl.greater, 0.5), (1.75, nl.greater_equal, 0.5),
    (2.5, nl.greater, 1.0), (3.5, nl.greater_equal, 1.0), (5.0, nl.greater, 2.0),
)  # fmt: skip
"""Halfway points of e2m1, whether the point itself is rounded up, which is to even, and how far it is to the next value."""


@nki.jit
def compressed_qdq(x: nl.NkiTensor) -> nl.NkiTensor:
    """x with each group of 16 columns rounded to e2m1 values times the group's e4m3fn scale.

    Dimensions:
        M: rows. K: columns, a multiple of 16. L = M K / 16: groups; two cores take half of them each.

    Args:
        x [M, K] fp32 @ HBM.

    Returns:
        [M, K] fp32 @ HBM.

    Notes:
        Reference: formats.qdq_fp4_e4m3; the same bits where x holds bf16 values. Nothing is divided by a scale, which is no
        power of two: |x| is compared with the halfway points times the scale. They have 7 bits, so that in bf16 values
        the comparison is exact; fp32 values within two ulp of a halfway point may fall to its other side.

    Pseudocode:
        s = min(e4m3fn(max(max|x|, 6 * 2^-9) / 6), 448)
        q = sum over halfway points h of step(h) * (|x| beyond h s);  out = sign(x) q s

    Cost:
        Per block of up to 64 groups per partition: 2 dma_copy, 34 VectorE and 1 ScalarE instructions. Predicted for 6 rows
        of 512, two cores: 7.9 us, of which 4 us are the latency of load and store.
    """
    rows, columns = x.shape
    assert x.dtype == nl.float32, f"x: expected float32, found {x.dtype}"
    assert columns % GROUP == 0, f"x [{rows}, {columns}]: the columns are no multiple of {GROUP}"
    out = nl.ndarray((rows, columns), nl.float32, buffer=nl.shared_hbm)
    for target, source in passes(out, x, GROUP):
        qdq_block(target, source)
    return out


def qdq_block(target: nl.NkiTensor, source: nl.NkiTensor) -> None:
    """QDQ of [P, groups, 16] fp32 @ HBM in one pass."""
    x_sb = nl.ndarray(source.shape, nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=source)
    abs_sb = nl.ndarray(x_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=abs_sb.view(nl.int32), data=x_sb.view(nl.int32), op0=nl.bitwise_and, operand0=MAGNITUDE32)
    scale_sb = group_scale(abs_sb)
    sum_sb = nl.ndarray(x_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sum_sb, value=0.0)
    halfway_sb = nl.ndarray(scale_sb.shape, nl.float32, buffer=nl.sbuf)
    beyond_sb = nl.ndarray(x_sb.shape, nl.float32, buffer=nl.sbuf)
    for halfway, comparison, step in STEPS:
        nisa.tensor_scalar(dst=halfway_sb, data=scale_sb, op0=nl.multiply, operand0=halfway)
        other = halfway_sb.expand_dim(2).broadcast(2, GROUP)
        nisa.tensor_tensor(dst=beyond_sb, data1=abs_sb, data2=other, op=comparison)
        nisa.scalar_tensor_tensor(dst=sum_sb, data=beyond_sb, op0=nl.multiply, operand0=step, op1=nl.add, operand1=sum_sb)
    nisa.activation(dst=beyond_sb, op=nl.sign, data=x_sb)
    nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=scale_sb.expand_dim(2).broadcast(2, GROUP), op=nl.multiply)
    nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=beyond_sb, op=nl.multiply)
    nisa.tensor_scalar(dst=sum_sb, data=sum_sb, op0=nl.add, operand0=0.0)
    nisa.dma_copy(dst=target, src=sum_sb)


def group_scale(abs_sb: nl.NkiTensor) -> nl.NkiTensor:
    """The e4m3fn scales [P, groups] fp32 of abs_sb [P, groups, 16]."""
    shape = abs_sb.shape[:2]
    ratio_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=ratio_sb, op=nl.maximum, data=abs_sb, axis=2)
    nisa.tensor_scalar(
        dst=ratio_sb, data=ratio_sb, op0=nl.maximum, operand0=LEAST_AMAX, op1=nl.multiply, operand1=1.0 / LARGEST
    )
    least_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=least_sb, value=LEAST_NORMAL)
    power_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    total_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    scale_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    round_to_grid(scale_sb, ratio_sb, least_sb, power_sb, power_sb, total_sb)
    nisa.tensor_scalar(dst=scale_sb, data=scale_sb, op0=nl.minimum, operand0=LARGEST_SCALE)
    return scale_sb
