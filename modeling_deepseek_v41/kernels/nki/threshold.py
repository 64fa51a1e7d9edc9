# SPDX-License-Identifier: Apache-2.0
"""The k best of each row as a mask, exactly: the k-th largest score bit by bit, then its ties by position.

A row of n scores lies as [128, n / 128], position p * (n / 128) + f at [p, f]; thresholds and counts of R rows are [128, R],
the same on every partition. A float's bits, toggled from the sign downwards, walk through all floats in order, so the k-th
largest needs one count per bit: 32 for float32, 16 for bfloat16. Counts and positions are exact in fp32.
"""

import nki.isa as nisa
import nki.language as nl

from .split import PARTITIONS

LOWEST = {nl.float32: -3.4028234663852886e38, nl.bfloat16: -3.3895313892515355e38}
"""The least finite value: what is not visible; a visible score is above it."""
BITS = {nl.float32: 32, nl.bfloat16: 16}
ALL_ONES = {nl.float32: -1.0, nl.bfloat16: -65536.0}
"""As int32, the bits of a float below all others, those that the dtype does not have cleared."""
ROW_BYTES = 64 * 1024
"""Of a partition, for the scores of the rows that are searched together."""


def rows_together(per_part: int, dtype: str) -> int:
    """How many rows of n = 128 * per_part scores are searched at a time."""
    return max(1, ROW_BYTES // (per_part * (4 if dtype == nl.float32 else 2)))


def load_visible(row_sb: nl.NkiTensor, scores: nl.NkiTensor, visible: nl.NkiTensor) -> None:
    """One row of scores and visible (uint8) [n] @ HBM to row_sb [128, n / 128]; what is not visible becomes LOWEST."""
    shape = row_sb.shape
    raw_sb = nl.ndarray(shape, scores.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw_sb, src=scores.reshape(shape))
    visible_sb = nl.ndarray(shape, nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=visible_sb, src=visible.reshape(shape))
    lowest = LOWEST[scores.dtype]
    nisa.select_reduce(dst=row_sb, predicate=visible_sb, on_true=raw_sb, on_false=lowest)


def kth_largest(rows_sb: nl.NkiTensor, k: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Of each row of rows_sb [128, R, F]: its k-th largest score, and how many of the scores equal to it are chosen.

    Both [128, R] fp32. Where fewer than k scores are above LOWEST, the score is LOWEST and none of its equals are chosen.
    """
    parts, rows, _ = rows_sb.shape
    dtype = rows_sb.dtype
    ones_sb = nl.ones((parts, parts), nl.float32)
    state_sb = nl.zeros((parts, rows), nl.float32)
    total_psum = _count(rows_sb, nl.greater_equal, state_sb, ones_sb)
    bits_sb = nl.ndarray((parts, rows), nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bits_sb, data=total_psum, op0=nl.less, operand0=float(k), op1=nl.multiply, operand1=ALL_ONES[dtype])
    for bit in range(30, 31 - BITS[dtype], -1):
        tried_sb = nl.ndarray((parts, rows), nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=tried_sb, data=bits_sb, op0=nl.bitwise_xor, operand0=1 << bit)
        total_psum = _count(rows_sb, nl.greater_equal, tried_sb.view(nl.float32), ones_sb)
        kept_sb = nl.ndarray((parts, rows), nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=kept_sb, data=total_psum, op0=nl.greater_equal, operand0=float(k), op1=nl.multiply, operand1=float(1 << bit)
        )
        nisa.tensor_tensor(dst=bits_sb, data1=bits_sb, data2=kept_sb, op=nl.bitwise_xor)
    least_sb = bits_sb.view(nl.float32)
    above_psum = _count(rows_sb, nl.greater, least_sb, ones_sb)
    equals_sb = nl.ndarray((parts, rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=equals_sb, data=above_psum, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=float(k))
    nisa.scalar_tensor_tensor(
        dst=equals_sb, data=least_sb, op0=nl.greater, operand0=LOWEST[dtype], op1=nl.multiply, operand1=equals_sb
    )
    return least_sb, equals_sb


def _count(rows_sb: nl.NkiTensor, op: nl.NkiTensor, bound_sb: nl.NkiTensor, ones_sb: nl.NkiTensor) -> nl.NkiTensor:
    """How many scores of each row are (op) its bound [128, R]: [128, R] in PSUM, on every partition the row's total."""
    parts, rows, per_part = rows_sb.shape
    found_sb = nl.ndarray((parts, rows), nl.float32, buffer=nl.sbuf)
    for r in range(rows):
        flags_sb = nl.ndarray((parts, per_part), nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(
            dst=flags_sb, data=rows_sb[:, r, :], op0=op, operand0=bound_sb[:, r : r + 1], reduce_op=nl.add,
            reduce_res=found_sb[:, r : r + 1],
        )  # fmt: skip
    total_psum = nl.ndarray((parts, rows), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total_psum, stationary=ones_sb, moving=found_sb, accumulate=False)
    return total_psum


def before_matrix() -> nl.NkiTensor:
    """[128, 128] fp32, 1 at [q, p] where q < p: as a stationary tile it sums what lies on the partitions before each."""
    before_sb = nl.ones((PARTITIONS, PARTITIONS), nl.float32)
    nisa.affine_select(
        dst=before_sb, pattern=[[1, PARTITIONS]], channel_multiplier=-1, on_true_tile=before_sb, on_false_value=0.0,
        cmp_op=nl.greater,
    )  # fmt: skip
    return before_sb


def best_mask(row_sb: nl.NkiTensor, least: nl.NkiTensor, equals: nl.NkiTensor, before_sb: nl.NkiTensor) -> nl.NkiTensor:
    """[128, F] float16: 1 at the scores above ``least`` and at the first ``equals`` of those equal to it, both [128, 1]."""
    shape = row_sb.shape
    equal_sb = nl.ndarray(shape, nl.float16, buffer=nl.sbuf)
    here_sb = nl.ndarray((shape[0], 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(dst=equal_sb, data=row_sb, op0=nl.equal, operand0=least, reduce_op=nl.add, reduce_res=here_sb)
    room_sb = nl.ndarray((shape[0], 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=room_sb, data1=equals, data2=sum_before(here_sb, before_sb), op=nl.subtract)
    order_sb = nl.ndarray(shape, nl.float16, buffer=nl.sbuf)
    nisa.tensor_scalar_cumulative(dst=order_sb, src=equal_sb, op0=nl.multiply, op1=nl.add, imm0=1.0)
    mask_sb = nl.ndarray(shape, nl.float16, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=mask_sb, data=order_sb, op0=nl.less_equal, operand0=room_sb, op1=nl.multiply, operand1=equal_sb
    )
    nisa.scalar_tensor_tensor(dst=mask_sb, data=row_sb, op0=nl.greater, operand0=least, op1=nl.add, operand1=mask_sb)
    return mask_sb


def sum_before(here_sb: nl.NkiTensor, before_sb: nl.NkiTensor) -> nl.NkiTensor:
    """The sum of here_sb [128, 1] over the partitions before each: [128, 1] in PSUM."""
    sum_psum = nl.ndarray(here_sb.shape, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sum_psum, stationary=before_sb, moving=here_sb, accumulate=False)
    return sum_psum
