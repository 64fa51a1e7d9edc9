# SPDX-License-Identifier: Apache-2.0
"""Gathered sparse attention: softmax over the window and over rows chosen by index, with a sink. Keys are the values."""

import nki
import nki.isa as nisa
import nki.language as nl

from .layout import columns, diagonal, gather, transposed
from .split import BANK, PARTITIONS, core_share, tiles

HIDDEN = -1e30
"""Added to the score of a key that a query does not see."""
FLOOR = -1e29
"""No real score is lower: the maximum of a query without keys, so that its probabilities become 0."""
LARGEST_EXPONENT = 87.0
"""exp of it and its reciprocal are normal fp32 numbers."""
AHEAD = 4
"""Queries whose gathers are issued before a query's keys are used."""
GROUP_BYTES = 64 * 1024
"""Of a partition, for the selected rows of the queries that share a softmax."""


@nki.jit
def sparse_attention(
    q: nl.NkiTensor, ring: nl.NkiTensor, ring_idxs: nl.NkiTensor, kv: nl.NkiTensor, near_bias: nl.NkiTensor,
    sink: nl.NkiTensor, far: nl.NkiTensor | None = None, topk_idxs: nl.NkiTensor | None = None,
) -> nl.NkiTensor:  # fmt: skip
    """o[t, h] = sum of P[t, h, key] kv[key] / (sum of P + exp(sink[h] - m)), P = exp(q[t, h] . kv[key] D^-0.5 - m).

    Dimensions:
        T: queries, 1 to 128. H: heads, 1 to 128. D: head_dim, even, up to 512; a multiple of 128 where above it.
        R: ring rows that the call's queries may see (sliding_window - 1). S: the call's own rows; R + S <= 512.
        N: compressed rows. K: selected rows per query, up to 512; a multiple of ceil(K / 128).

    Args (dtype is bfloat16 or float32, the same for all that say so):
        q [T, H, D] dtype @ HBM, rotated.
        ring [C, D] dtype @ HBM, window KV of earlier positions.
        ring_idxs [R, 1] int32 @ HBM, rows of ``ring``, -1 for none.
        kv [S, D] dtype @ HBM, window KV of the call's own tokens.
        near_bias [T, R + S] dtype @ HBM, 0 where query t sees the row, else -1e30 (HIDDEN).
        sink [H, 1] float32 @ HBM.
        far [N, D] dtype @ HBM and topk_idxs [T, K] int32 @ HBM, rows of ``far``, -1 for none; or neither.

    Returns:
        o [T, H, D] dtype @ shared HBM. A query without a key gives zeros.

    Notes:
        - Reference: attention.softmax_attention. The maximum leaves the sink out, P is rounded before it meets the values,
          the denominator is summed before that rounding.
        - Rows of -1 are not read: their tile was zeroed and the DMA skips them, so unused memory may hold NaN.
        - Each core has its own queries. Groups of up to 128 / H queries share one softmax: a query's keys meet a stationary
          tile that is zero for the other queries, so that all scores add up in one PSUM tile.
        - Selected row j = p I + i of a query, I = ceil(K / 128), is on partition p of its i-th gather: the order of keys is
          free, and so each partition reads its indices in one piece.

    Pseudocode:
        near = [ring[ring_idxs], kv];  near_t = transpose(near)
        for queries t of a group of this core:
            own[t] = far[topk_idxs[t]], AHEAD queries early;  own_t = transpose(own[t])
            s[t] = [q[t] near_t + near_bias[t], q[t] own_t + own_bias[t]]
        m = max(max(s), FLOOR);  p = exp(D^-0.5 (s - m));  total = sum(p) + exp(min(sink - D^-0.5 m, 87))
        o = (round(p) [near, own]) / total

    Cost:
        With C = D / 128 and w window tiles of up to 128 rows, per query: I gathers, C I transposes, C + I matmuls of up to
        512 columns. Per group: C + w + I transposes and C + w + 2 matmuls; per core C w transposes of the window.
        Bound: a query's DMA, K rows of D values (1.4 us at 512 x 1 KiB without descriptors), or GpSimd, which writes K
        descriptors (3.4 us at the assumed 8 cycles each). Predicted for 6 queries x 640 rows, 8 heads, two cores: 24.7 us,
        8.1 us of DMA, 11.1 us of GpSimd, 9.2 us of the tensor engine.
    """
    rows, heads, dim = q.shape
    window, own_rows = ring_idxs.shape[0], kv.shape[0]
    near = window + own_rows
    chunk = min(dim, PARTITIONS)
    assert 1 <= rows <= PARTITIONS and heads <= PARTITIONS, f"q {q.shape}: at most 128 queries and 128 heads"
    assert dim <= BANK and dim % 2 == 0 and dim % chunk == 0, f"q {q.shape}: head_dim even, to 512, 128 or more in 128s"
    assert near <= BANK, f"ring_idxs {ring_idxs.shape}, kv {kv.shape}: at most 512 window rows"
    assert near_bias.shape == (rows, near), f"near_bias {near_bias.shape}, expected {(rows, near)}"
    assert sink.shape == (heads, 1), f"sink {sink.shape}, expected {(heads, 1)}"
    assert (far is None) == (topk_idxs is None), "far and topk_idxs come together"
    selected, gathers = 0, 0
    if topk_idxs is not None:
        selected = topk_idxs.shape[1]
        gathers = -(-selected // PARTITIONS)
        assert 1 <= selected <= BANK and selected % gathers == 0, f"topk_idxs {topk_idxs.shape}: to 512, in {gathers}s"
    out = nl.ndarray((rows, heads, dim), q.dtype, buffer=nl.shared_hbm)
    first, count = core_share(rows)
    size = 2 if q.dtype == nl.bfloat16 else 4
    group = max(1, min(PARTITIONS // heads, GROUP_BYTES // max(1, gathers * dim * size)))

    near_tiles: list = []
    gathered: list = []
    for start, members in tiles(count, group):
        mine = (first + start, members)
        if start == 0:
            near_tiles = _near_rows(ring, ring_idxs, kv)
        if selected > 0:
            index_sb, far_bias_sb = _choices(topk_idxs, mine, gathers, q.dtype)
            gathered = []
            for t in range(min(AHEAD, members)):
                gathered.append(gather(far, index_sb[:, t, :]))
        if start == 0:
            near_t_sb = columns(near_tiles, dim, chunk)
        pick_sb = _picker(members, heads, q.dtype)
        bias_sb = nl.ndarray((members, near), q.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=bias_sb, src=near_bias[mine[0] : mine[0] + members])
        q_t_sb = columns(_query_rows(q, mine), dim, chunk)
        near_psum, far_psum = _start_scores(pick_sb, bias_sb), None
        _add_scores(near_psum, q_t_sb, near_t_sb)
        most_sb = nl.ndarray((members * heads, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=most_sb, op=nl.maximum, data=near_psum, axis=1)
        if selected > 0:
            far_psum = _start_scores(pick_sb, far_bias_sb)
            own_q_sb = diagonal(q_t_sb, members)
            for t in range(members):
                if t + AHEAD < members:
                    gathered.append(gather(far, index_sb[:, t + AHEAD, :]))
                _add_scores(far_psum, own_q_sb[:, :, t, :], columns(gathered[t], dim, chunk))
        _attend(out[mine[0] : mine[0] + members], (near_psum, far_psum, most_sb), near_tiles, gathered, sink)
    return out


def _near_rows(ring: nl.NkiTensor, ring_idxs: nl.NkiTensor, kv: nl.NkiTensor) -> list:
    """The window's rows in tiles of up to 128: those of the ring by index, then the call's own."""
    found = []
    for first, count in tiles(ring_idxs.shape[0], PARTITIONS):
        index_sb = nl.ndarray((count, 1), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=index_sb, src=ring_idxs[first : first + count])
        found += gather(ring, index_sb)
    for first, count in tiles(kv.shape[0], PARTITIONS):
        rows_sb = nl.ndarray((count, kv.shape[1]), kv.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows_sb, src=kv[first : first + count])
        found.append(rows_sb)
    return found


def _choices(topk_idxs: nl.NkiTensor, mine: tuple, gathers: int, dtype: str) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Indices [P, members, I], selected row p I + i of a query at [p, :, i], and bias [members, I P] in that order."""
    first, members = mine
    selected = topk_idxs.shape[1]
    sizes = (selected // gathers, gathers)
    chosen = topk_idxs[first : first + members]
    index_sb = nl.ndarray((sizes[0], members, gathers), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=index_sb, src=chosen.reshape_dim(1, sizes).permute((1, 0, 2)))
    row_sb = nl.ndarray((members, selected), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row_sb, src=chosen)
    bias_sb = nl.ndarray((members, gathers, sizes[0]), dtype, buffer=nl.sbuf)
    in_order = row_sb.reshape_dim(1, sizes).permute((0, 2, 1))
    nisa.tensor_scalar(dst=bias_sb, data=in_order, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=HIDDEN)
    return index_sb, bias_sb.flatten_dims(1, 2)


def _picker(members: int, heads: int, dtype: str) -> nl.NkiTensor:
    """[members, (members, H)]: 1 at [t, (t, h)]. As a matmul's stationary tile it copies row t to the heads of query t."""
    identity_sb = nl.shared_identity_matrix(members, dtype)
    pick_sb = nl.ndarray((members, members, heads), dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=pick_sb, src=identity_sb.expand_dim(2).broadcast(2, heads))
    return pick_sb.flatten_dims(1, 2)


def _query_rows(q: nl.NkiTensor, mine: tuple) -> list:
    """The group's queries as one tile of rows (t, h)."""
    _, heads, dim = q.shape
    rows_sb = nl.ndarray((mine[1] * heads, dim), q.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows_sb, src=q.flatten_dims(0, 1)[mine[0] * heads : (mine[0] + mine[1]) * heads])
    return [rows_sb]


def _start_scores(pick_sb: nl.NkiTensor, bias_sb: nl.NkiTensor) -> nl.NkiTensor:
    """The bias of each query at its heads, [(members, H), keys] in PSUM."""
    scores_psum = nl.ndarray((pick_sb.shape[1], bias_sb.shape[1]), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=scores_psum, stationary=pick_sb, moving=bias_sb, accumulate=False)
    return scores_psum


def _add_scores(scores_psum: nl.NkiTensor, q_t: nl.NkiTensor, keys_t_sb: nl.NkiTensor) -> None:
    """Adds q . key."""
    for c in range(keys_t_sb.shape[1]):
        nisa.nc_matmul(dst=scores_psum, stationary=q_t[:, c, :], moving=keys_t_sb[:, c, :], accumulate=True)


def _attend(out: nl.NkiTensor, scores: tuple, near_tiles: list, gathered: list, sink: nl.NkiTensor) -> None:
    """Softmax of a group's scores and the sum of values: out [members, H, D].

    scores: those of the window, of the selected rows or None, and the maximum of the first.
    """
    members, heads, dim = out.shape
    rows, scale = members * heads, dim**-0.5
    near_psum, far_psum, near_most_sb = scores
    most_sb, total_sb = near_most_sb, nl.zeros((rows, 3), nl.float32)
    if far_psum is not None:
        most_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=most_sb, op=nl.maximum, data=far_psum, axis=1)
    shift_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shift_sb, data=near_most_sb, op0=nl.maximum, operand0=most_sb, op1=nl.maximum, operand1=FLOOR)
    nisa.tensor_scalar(dst=shift_sb, data=shift_sb, op0=nl.multiply, operand0=-scale)

    # the selected rows first: their chain is the longer one
    weights = []
    if far_psum is not None:
        p_sb = _exponentials(far_psum, shift_sb, scale, out.dtype, total_sb[:, 0:1])
        parts, gathers = gathered[0][0].shape[0], len(gathered[0])
        own_p_sb = diagonal(transposed(p_sb, 0, parts, gathers), members)
        for t in range(members):
            for i in range(gathers):
                weights.append((own_p_sb[:, i, t, :], gathered[t][i]))
    p_sb = _exponentials(near_psum, shift_sb, scale, out.dtype, total_sb[:, 1:2])
    place = 0
    for rows_sb in near_tiles:
        weights.append((transposed(p_sb, place, rows_sb.shape[0], 1)[:, 0, :], rows_sb))
        place += rows_sb.shape[0]
    out_psum = nl.ndarray((rows, dim), nl.float32, buffer=nl.psum)
    for i in range(len(weights)):
        nisa.nc_matmul(dst=out_psum, stationary=weights[i][0], moving=weights[i][1], accumulate=i > 0)

    rest_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rest_sb, src=sink.expand_dim(0).broadcast(0, members))
    nisa.tensor_scalar(dst=rest_sb, data=rest_sb, op0=nl.add, operand0=shift_sb, op1=nl.minimum, operand1=LARGEST_EXPONENT)
    nisa.activation(dst=total_sb[:, 2:3], op=nl.exp, data=rest_sb)
    nisa.tensor_reduce(dst=rest_sb, op=nl.add, data=total_sb, axis=1)
    nisa.reciprocal(dst=rest_sb, data=rest_sb)
    out_sb = nl.ndarray((rows, dim), out.dtype, buffer=nl.sbuf)
    half = dim // 2
    for first, last, engine in ((0, half, nisa.engine.vector), (half, dim, nisa.engine.scalar)):
        nisa.tensor_scalar(
            dst=out_sb[:, first:last], data=out_psum[:, first:last], op0=nl.multiply, operand0=rest_sb, engine=engine
        )
    nisa.dma_copy(dst=out.flatten_dims(0, 1), src=out_sb)


def _exponentials(
    scores_psum: nl.NkiTensor, shift_sb: nl.NkiTensor, scale: float, dtype: str, total: nl.NkiTensor
) -> nl.NkiTensor:
    """round(exp(scale * score + shift)), and the sum of each row before the rounding in ``total``."""
    p_sb = nl.ndarray(scores_psum.shape, dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=p_sb, op=nl.exp, data=scores_psum, bias=shift_sb, scale=scale, reduce_op=nl.add, reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    return p_sb
