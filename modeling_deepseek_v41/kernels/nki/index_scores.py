# SPDX-License-Identifier: Apache-2.0
"""Index scores: for every group the sum over index heads of weight * relu(query . key)."""

import nki
import nki.isa as nisa
import nki.language as nl

from .layout import columns
from .split import BANK, PARTITIONS, core_share, tiles

READ = 2048
"""Groups per DMA: 4 KiB of bf16 per partition."""
AHEAD = 3
"""Products that are under way while the heads of an earlier one are added up."""


@nki.jit
def index_scores(
    query: nl.NkiTensor, weights: nl.NkiTensor, keys: nl.NkiTensor, slot: nl.NkiTensor, count: int
) -> nl.NkiTensor:
    """score[t, g] = sum over heads of weights[t, h] * relu(query[t, h] . keys[slot, :, g]).

    Dimensions:
        T: rows, 1 to 128. h: index heads, up to 128. D: index_head_dim, up to 128. G: groups that a slot holds.

    Args (dtype is bfloat16 or float32, the same for all that say so):
        query [T, h, D] dtype @ HBM; weights [T, h] dtype @ HBM.
        keys [slots, D, G] dtype @ HBM, a key per column.
        slot [1, 1] int32 @ HBM, whose keys.
        count: the first so many groups are scored.

    Returns:
        [T, count] dtype @ shared HBM.

    Notes:
        - Reference: indexer.index_scores. In bf16 the dot product, relu times weight and the sum are rounded, each once.
        - (t, h) pairs lie on the partitions, 128 / h rows per matmul. A second matmul with a 0/1 tile adds up the heads;
          since the products must be rounded before it, the weights are no part of that tile.
        - A group's column meets no other, so keys that were never written (NaN) spoil their own scores alone.
        - Each core has its own groups.

    Pseudocode:
        for 512 groups of this core:
            for rows t of a tile of 128 / h:
                r = round(relu(q[(t, h), :] keys[:, groups]));  w = round(weights[(t, h)] * r)
                score[t] += sum over h of w[(t, h)]
            out[:, groups] = round(score)

    Cost:
        Per 512 groups and tile of 128 / h rows: two matmuls of 512 columns (0.43 us), a pass from PSUM on ScalarE (0.43 us)
        and a quick one over bf16 on VectorE; per 512 groups a copy out of PSUM. The tensor engine bounds it, ScalarE and
        VectorE being as busy; the keys' DMA takes half of that. Predicted for 6 rows (two tiles), 32 heads of 128, bf16,
        two cores: up to 11 us + 0.85 us x n / 1,024, 120 us at n = 131,072.
    """
    rows, heads, dim = query.shape
    dtype, together = query.dtype, PARTITIONS // heads
    assert rows <= PARTITIONS and heads <= PARTITIONS and dim <= PARTITIONS, f"query {query.shape}: each at most 128"
    assert weights.shape == (rows, heads), f"weights {weights.shape}, expected {(rows, heads)}"
    assert keys.shape[1] == dim and 1 <= count <= keys.shape[2], f"keys {keys.shape}, count {count}, head_dim {dim}"
    assert keys.dtype == dtype and weights.dtype == dtype, f"query {dtype}, weights {weights.dtype}, keys {keys.dtype}"
    out = nl.ndarray((rows, count), dtype, buffer=nl.shared_hbm)
    first, mine = core_share(count, BANK)
    if mine == 0:
        return out

    slot_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=slot_sb, src=slot)
    row_tiles = []
    for start, members in tiles(rows, together):
        row_tiles.append(_row_tile(query, weights, start, members))
    steps = []
    for start, wide in tiles(mine, READ):
        for column, groups in tiles(wide, BANK):
            for i in range(len(row_tiles)):
                steps.append((first + start, wide, column, groups, i))
    weighted = []
    for s in range(len(steps) + AHEAD):
        if s < len(steps):
            place, wide, column, groups, i = steps[s]
            if column == 0 and i == 0:
                keys_sb = nl.ndarray((dim, wide), dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=keys_sb, src=keys[:, :, place : place + wide].select(0, slot_sb))
            weighted.append(_weighted(row_tiles[i], keys_sb[:, column : column + groups]))
        if s >= AHEAD:
            place, wide, column, groups, i = steps[s - AHEAD]
            if column == 0 and i == 0:
                scores_sb = nl.ndarray((rows, wide), dtype, buffer=nl.sbuf)
            if i == 0:
                score_psum = nl.ndarray((rows, groups), nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=score_psum, stationary=row_tiles[i][2], moving=weighted[s - AHEAD], accumulate=i > 0)
            if i == len(row_tiles) - 1:
                nisa.tensor_copy(dst=scores_sb[:, column : column + groups], src=score_psum)
                if column + groups == wide:
                    nisa.dma_copy(dst=out[:, place : place + wide], src=scores_sb)
    return out


def _row_tile(query: nl.NkiTensor, weights: nl.NkiTensor, first: int, members: int) -> tuple:
    """Of rows first .. first + members: queries [D, (t, h)], weights [(t, h), 1] fp32, and the adder [(t, h), T]."""
    rows, heads, dim = query.shape
    pairs = members * heads
    q_sb = nl.ndarray((pairs, dim), query.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=q_sb, src=query[first : first + members].flatten_dims(0, 1))
    q_t_sb = columns([q_sb], dim, dim)
    weight_sb = nl.ndarray((pairs, 1), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=weight_sb, src=weights[first : first + members])
    adder_sb = nl.ones((pairs, rows), query.dtype)
    for op, offset in ((nl.greater_equal, first * heads), (nl.less, (first - 1) * heads)):
        nisa.affine_select(
            dst=adder_sb, pattern=[[-heads, rows]], offset=offset, channel_multiplier=1, on_true_tile=adder_sb,
            on_false_value=0.0, cmp_op=op,
        )  # fmt: skip
    return q_t_sb[:, 0, :], weight_sb, adder_sb


def _weighted(row_tile: tuple, keys: nl.NkiTensor) -> nl.NkiTensor:
    """round(weight * round(relu(q . key))), [(t, h), groups]."""
    q_t, weight_sb, _ = row_tile
    shape = (q_t.shape[1], keys.shape[1])
    dot_psum = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=dot_psum, stationary=q_t, moving=keys, accumulate=False)
    relu_sb = nl.ndarray(shape, q_t.dtype, buffer=nl.sbuf)
    nisa.activation(dst=relu_sb, op=nl.relu, data=dot_psum)
    nisa.tensor_scalar(dst=relu_sb, data=relu_sb, op0=nl.multiply, operand0=weight_sb)
    return relu_sb
