# SPDX-License-Identifier: Apache-2.0
"""Candidate blocks: the blocks of neighbouring groups that hold the best scores of each row, the newest one pinned."""

import nki
import nki.isa as nisa
import nki.language as nl

from .split import PARTITIONS, core_share, tiles
from .threshold import BITS, before_matrix, best_mask, kth_largest, load_visible, rows_together

PINNED = 2.0**127
"""Added to the newest block's best score: above every other, in fp32 and bf16."""


@nki.jit
def candidate_blocks(scores: nl.NkiTensor, visible: nl.NkiTensor, newest: nl.NkiTensor, size: int, most: int) -> nl.NkiTensor:
    """Which blocks of ``size`` groups are among the ``most`` best of each row, by their highest visible score.

    Dimensions:
        T: rows, from 1. n: groups, a multiple of 128 * size up to 2,097,152; blocks = n / size.

    Args:
        scores [T, n] float32 or bfloat16 @ HBM; visible ones are finite and their magnitude is below 2^126.
        visible [T, n] uint8 @ HBM, 0 for a score that is out of the running; it may be NaN.
        newest [T, 1] float32 @ HBM, the block that is always among the best, -1 for none; it has a visible score.
        size, most: groups per block, blocks per row.

    Returns:
        [T, blocks] uint8 @ shared HBM, 1 for a candidate. A block without a visible score is none.

    Notes:
        - docs/model.md, section 6, bit for bit; equal scores by lower block number. Where ranks hold parts of the groups
          and their block maxima meet first, those are the scores and ``size`` is 1.
        - A partition holds n / 128 neighbouring groups, so that a block lies inside one and its maximum is one reduction.
        - Each core has its own rows.

    Pseudocode:
        best[b] = max(scores[b size : (b + 1) size] where visible), + 2^127 for b = newest
        least, equals = kth_largest(best, most);  out = best_mask(best, least, equals)

    Cost:
        Per row of a core three passes over n / 128 scores per partition (two to hide, one to reduce); the search, B + 1
        counts of n / 128 / size, costs its latency, about 1 us per bit. Predicted for 6 rows on two cores: up to
        24.5 us + 3 rows x 5 us x n / 131,072 in bfloat16, 41.5 us + 3 rows x 9.5 us x n / 131,072 in float32.
    """
    total, n = scores.shape
    per_part = n // PARTITIONS
    blocks = per_part // size
    assert scores.dtype in BITS, f"scores {scores.dtype}, expected float32 or bfloat16"
    assert visible.shape == scores.shape and visible.dtype == nl.uint8, f"visible {visible.shape} {visible.dtype}"
    assert newest.shape == (total, 1), f"newest {newest.shape}, expected {(total, 1)}"
    assert n % (PARTITIONS * size) == 0 and blocks <= 2048, f"n {n}: expected a multiple of {128 * size}, up to 2^18 blocks"
    assert most >= 1, f"most {most}"
    out = nl.ndarray((total, n // size), nl.uint8, buffer=nl.shared_hbm)
    first, count = core_share(total)
    if count == 0:
        return out

    before_sb = before_matrix()
    number_sb = nl.ndarray((PARTITIONS, blocks), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=number_sb, pattern=[[1, blocks]], channel_multiplier=blocks)
    for start, rows in tiles(count, rows_together(per_part, scores.dtype)):
        mine = first + start
        best_sb = nl.ndarray((PARTITIONS, rows, blocks), scores.dtype, buffer=nl.sbuf)
        for r in range(rows):
            row_sb = nl.ndarray((PARTITIONS, per_part), scores.dtype, buffer=nl.sbuf)
            load_visible(row_sb, scores[mine + r], visible[mine + r])
            nisa.tensor_reduce(dst=best_sb[:, r, :], op=nl.maximum, data=row_sb.reshape_dim(1, (blocks, size)), axis=2)
            newest_sb = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=newest_sb, src=newest[mine + r].expand_dim(0).broadcast(0, PARTITIONS))
            pin_sb = nl.ndarray((PARTITIONS, blocks), nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=pin_sb, data=number_sb, op0=nl.equal, operand0=newest_sb, op1=nl.multiply, operand1=PINNED)
            nisa.tensor_tensor(dst=best_sb[:, r, :], data1=best_sb[:, r, :], data2=pin_sb, op=nl.add)
        least_sb, equals_sb = kth_largest(best_sb, min(most, n // size))
        for r in range(rows):
            mask_sb = best_mask(best_sb[:, r, :], least_sb[:, r : r + 1], equals_sb[:, r : r + 1], before_sb)
            out_sb = nl.ndarray((PARTITIONS, blocks), nl.uint8, buffer=nl.sbuf)
            nisa.tensor_copy(dst=out_sb, src=mask_sb)
            nisa.dma_copy(dst=out[mine + r].reshape((PARTITIONS, blocks)), src=out_sb)
    return out
