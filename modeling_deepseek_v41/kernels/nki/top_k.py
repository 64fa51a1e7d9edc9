# SPDX-License-Identifier: Apache-2.0
"""Exact top-k: positions of the k best visible scores, ascending, with one tie rule: higher score, then lower position."""

import nki
import nki.isa as nisa
import nki.language as nl

from .split import BANK, PARTITIONS, core_share, tiles
from .threshold import BITS, before_matrix, best_mask, kth_largest, load_visible, rows_together, sum_before

LARGEST_COUNT = 2048
"""float16 holds every integer up to it."""


@nki.jit
def top_k(scores: nl.NkiTensor, visible: nl.NkiTensor, k: int) -> nl.NkiTensor:
    """The positions of the k best visible scores of each row, ascending, then -1 where fewer are visible.

    Dimensions:
        T: rows, from 1. n: scores per row, a multiple of 128 up to 262,144; F = n / 128. k: up to 2048, best a multiple of
        ceil(k / 128), as 512 is: otherwise the output is written in more and smaller pieces.

    Args:
        scores [T, n] float32 or bfloat16 @ HBM; visible ones are finite and above the least finite number.
        visible [T, n] uint8 @ HBM, 0 for a score that is out of the running; it may be NaN.
        k: how many.

    Returns:
        [T, k] int32 @ shared HBM.

    Notes:
        - Reference: topk.top_ascending, bit for bit. -0.0 equals 0.0, for comparisons are those of fp32.
        - threshold.py finds the mask. Its running count, k at most and so exact in float16, says where each chosen score
          goes. For output slot s a one-hot matmul fetches the counts of the partition that holds it; how many of them are
          <= s is the place in that partition. No scatter, no data-dependent loop, the same time for every input.
        - Each core has its own rows.

    Pseudocode:
        least, equals = kth_largest(scores where visible, k)
        chosen = scores > least or (scores == least and its rank among equals by position <= equals)
        count[p, f] = chosen up to and including position p F + f
        for slot s: p = the partition with count[p - 1, F - 1] <= s < count[p, F - 1];  f = sum(count[p, :] <= s)
            out[s] = p F + f if s < count[127, F - 1] else -1

    Cost:
        Per core: B + 1 counting passes over F scores per partition and row, B = 32 for float32 and 16 for bfloat16 (which
        also runs four times faster), then per row six passes of F and ceil(k / 128) of F from PSUM. VectorE bounds it.
        Predicted for 6 rows, k = 512, two cores: up to 36 us + 3 rows x 15.5 us x n / 131,072 in bfloat16,
        51 us + 3 rows x 48.5 us x n / 131,072 in float32.
    """
    total, n = scores.shape
    assert 1 <= k <= LARGEST_COUNT, f"k {k}: expected 1 to 2048"
    per_part, slots = n // PARTITIONS, -(-k // PARTITIONS)
    while k % slots != 0:
        slots += 1
    assert scores.dtype in BITS, f"scores {scores.dtype}, expected float32 or bfloat16"
    assert visible.shape == scores.shape and visible.dtype == nl.uint8, f"visible {visible.shape} {visible.dtype}"
    assert n % PARTITIONS == 0 and per_part <= LARGEST_COUNT, f"n {n}: expected a multiple of 128 up to 262144"
    out = nl.ndarray((total, k), nl.int32, buffer=nl.shared_hbm)
    first, count = core_share(total)
    if count == 0:
        return out

    before_sb = before_matrix()
    constants = _slots(k, slots)
    for start, rows in tiles(count, rows_together(per_part, scores.dtype)):
        rows_sb = nl.ndarray((PARTITIONS, rows, per_part), scores.dtype, buffer=nl.sbuf)
        for r in range(rows):
            load_visible(rows_sb[:, r, :], scores[first + start + r], visible[first + start + r])
        least_sb, equals_sb = kth_largest(rows_sb, min(k, n))
        for r in range(rows):
            mask_sb = best_mask(rows_sb[:, r, :], least_sb[:, r : r + 1], equals_sb[:, r : r + 1], before_sb)
            _write_positions(out[first + start + r], mask_sb, before_sb, constants)
    return out


def _slots(k: int, slots: int) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:
    """Every slot on every partition [128, k]; slot i * slots + j at [i, j]; the partition's number [128, 1] float16."""
    all_sb = nl.ndarray((PARTITIONS, k), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=all_sb, pattern=[[1, k]])
    mine_sb = nl.ndarray((k // slots, slots), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=mine_sb, pattern=[[1, slots]], channel_multiplier=slots)
    part_sb = nl.ndarray((PARTITIONS, 1), nl.float16, buffer=nl.sbuf)
    nisa.iota(dst=part_sb, pattern=[[1, 1]], channel_multiplier=1)
    return all_sb, mine_sb, part_sb


def _write_positions(out: nl.NkiTensor, mask_sb: nl.NkiTensor, before_sb: nl.NkiTensor, constants: tuple) -> None:
    """The positions of the ones of mask_sb [128, F] to out [k], ascending, -1 where there are fewer."""
    all_sb, mine_sb, part_sb = constants
    parts, per_part = mask_sb.shape
    wide, slots = mine_sb.shape
    count_sb = nl.ndarray((parts, per_part), nl.float16, buffer=nl.sbuf)
    nisa.tensor_scalar_cumulative(dst=count_sb, src=mask_sb, op0=nl.multiply, op1=nl.add, imm0=1.0)
    here_sb = nl.ndarray((parts, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=here_sb, src=count_sb[:, per_part - 1 : per_part])
    start_sb = nl.ndarray((parts, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=start_sb, src=sum_before(here_sb, before_sb))
    stop_sb = nl.ndarray((parts, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=stop_sb, data1=start_sb, data2=here_sb, op=nl.add)
    nisa.tensor_scalar(dst=count_sb, data=count_sb, op0=nl.add, operand0=start_sb)

    holder_sb = nl.ndarray((parts, wide * slots), nl.float16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=holder_sb, data=all_sb, op0=nl.greater_equal, operand0=start_sb)
    nisa.scalar_tensor_tensor(dst=holder_sb, data=all_sb, op0=nl.less, operand0=stop_sb, op1=nl.multiply, operand1=holder_sb)
    by_slot = holder_sb.reshape_dim(1, (wide, slots))
    ones_sb = nl.ones((parts, wide), nl.float32)
    total_psum = nl.ndarray((wide, 1), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total_psum, stationary=ones_sb, moving=here_sb, accumulate=False)
    holder_psum = nl.ndarray((wide, slots), nl.float32, buffer=nl.psum)
    place_sb = nl.ndarray((wide, slots), nl.float32, buffer=nl.sbuf)
    for j in range(slots):
        nisa.nc_matmul(dst=holder_psum[:, j : j + 1], stationary=by_slot[:, :, j], moving=part_sb, accumulate=False)
        for first, width in tiles(per_part, BANK):
            count_psum = nl.ndarray((wide, width), nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=count_psum, stationary=by_slot[:, :, j], moving=count_sb[:, first : first + width], accumulate=False
            )
            flags_sb = nl.ndarray((wide, width), nl.float16, buffer=nl.sbuf)
            nisa.tensor_scalar_reduce(
                dst=flags_sb, data=count_psum, op0=nl.less_equal, operand0=mine_sb[:, j : j + 1], reduce_op=nl.add,
                reduce_res=place_sb[:, j : j + 1] if first + width == per_part else None,
                reduce_cmd=nisa.reduce_cmd.reset_reduce if first == 0 else nisa.reduce_cmd.reduce,
            )  # fmt: skip
    nisa.scalar_tensor_tensor(
        dst=place_sb, data=holder_psum, op0=nl.multiply, operand0=float(per_part), op1=nl.add, operand1=place_sb
    )
    total_sb = nl.ndarray((wide, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=total_sb, src=total_psum)
    filled_sb = nl.ndarray((wide, slots), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=filled_sb, data=mine_sb, op0=nl.less, operand0=total_sb)
    nisa.scalar_tensor_tensor(dst=place_sb, data=place_sb, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=filled_sb)
    out_sb = nl.ndarray((wide, slots), nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=out_sb, data=place_sb, op0=nl.add, operand0=-1.0)
    nisa.dma_copy(dst=out.reshape((wide, slots)), src=out_sb)
