# SPDX-License-Identifier: Apache-2.0
"""The activation QDQ of release numerics as a kernel: 1x32 groups, e4m3fn at 448, power-of-two scales."""

import nki
import nki.isa as nisa
import nki.language as nl

from .groups import passes
from .rounding import grid_floor, magnitude, round_to_grid

GROUP = 32
SHRINK = 2.0**-24
"""Rounding adds 1.5 * 2^20 times the value; a value beyond 2^107 would overflow, 2^-24 of it does not."""


@nki.jit
def activation_qdq(x: nl.NkiTensor) -> nl.NkiTensor:
    """x with each group of 32 columns rounded to e4m3fn values times a power of two; the same as formats.qdq_fp8.

    Made for the input of a quantised linear, once per activation: 1 to 128 rows, or any number.

    Dimensions:
        M: rows. K: columns, a multiple of 32. L = M * K / 32: groups; two cores take half of them each.

    Args:
        x [M, K] bf16 @ HBM, finite.

    Returns:
        [M, K] bf16 @ HBM: e4m3fn(x / s) * s, exact in bf16.

    Notes:
        Equal to formats.qdq_fp8 to the bit below 2^108, and to its definition for every finite bf16.
        Groups lie on partitions: the most, at most 128, that divide a core's groups (a prime number beyond 128: one).

    Pseudocode:
        per group g:  f = exponent of (max(max|x|, 1e-4) * (2 - 2^-23) / 448 * 2^-6) * 2^-24      # 2^-30 s
        per value:    y = x * 2^-24;  m = 1.5 * 2^20 * max(exponent of y, f);  out = ((y + m) - m) * 2^24

    Cost:
        Per block of up to 64 groups per partition: 2 dma_copy, 8 VectorE and 2 ScalarE instructions; VectorE takes 8.25
        cycles per value of a partition. 6 rows of 5120, predicted: 6.6 us on two cores, 8.0 us on one, of which 4 us are
        the latency of load and store and 1.3 and 2.3 us are VectorE's.
    """
    rows, columns = x.shape
    assert x.dtype == nl.bfloat16, f"x: expected bfloat16, found {x.dtype}"
    assert columns % GROUP == 0, f"x [{rows}, {columns}]: the columns are no multiple of {GROUP}"
    out = nl.ndarray((rows, columns), nl.bfloat16, buffer=nl.shared_hbm)
    for target, source in passes(out, x, GROUP):
        qdq_block(target, source)
    return out


def qdq_block(target: nl.NkiTensor, source: nl.NkiTensor) -> None:
    """QDQ of [P, groups, 32] bf16 @ HBM in one pass."""
    x_sb = nl.ndarray(source.shape, nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=source)
    out_sb = nl.ndarray(source.shape, nl.bfloat16, buffer=nl.sbuf)
    qdq(out_sb, x_sb)
    nisa.dma_copy(dst=target, src=out_sb)


def qdq(out_sb: nl.NkiTensor, x_sb: nl.NkiTensor) -> None:
    """QDQ of [P, groups, 32] bf16 @ SBUF; ``out_sb`` may be ``x_sb``. 8 VectorE and 2 ScalarE instructions."""
    shape = x_sb.shape
    abs_sb = nl.ndarray(shape, nl.bfloat16, buffer=nl.sbuf)
    magnitude(abs_sb, x_sb)
    amax_sb = nl.ndarray(shape[:2], nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=amax_sb, op=nl.maximum, data=abs_sb, axis=2)
    floor_sb = nl.ndarray(shape[:2], nl.float32, buffer=nl.sbuf)
    grid_floor(floor_sb, amax_sb, SHRINK)

    small_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=small_sb, data=x_sb, op0=nl.multiply, operand0=SHRINK, engine=nisa.engine.scalar)
    power_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    total_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    floor = floor_sb.expand_dim(2).broadcast(2, GROUP)
    round_to_grid(total_sb, small_sb, floor, power_sb, power_sb, total_sb)
    nisa.tensor_scalar(dst=out_sb, data=total_sb, op0=nl.multiply, operand0=1.0 / SHRINK, engine=nisa.engine.scalar)
