# SPDX-License-Identifier: Apache-2.0
"""Gathered sparse attention: softmax over the window and over rows chosen by index, with a sink. Keys are the values."""

import nki
import nki.isa as nisa
import nki.language as nl

from .split import BANK, PARTITIONS, core_share, tiles

HIDDEN = -1e30
"""Added to the score of a key that a query does not see."""
FLOOR = -1e29
"""No real score is lower: the maximum of a query without keys, so that its probabilities become 0."""
LARGEST_EXPONENT = 87.0
"""exp of it and its reciprocal are normal fp32 numbers."""
AHEAD = 3
"""Rows whose gathers are issued before a row is computed."""


@nki.jit
def sparse_attention(
    q: nl.NkiTensor, ring: nl.NkiTensor, ring_idxs: nl.NkiTensor, kv: nl.NkiTensor, near_bias: nl.NkiTensor,
    sink: nl.NkiTensor, far: nl.NkiTensor | None = None, topk_idxs: nl.NkiTensor | None = None,
) -> nl.NkiTensor:  # fmt: skip
    """o[t, h] = sum of P[t, h, key] kv[key] / (sum of P + exp(sink[h] - m)), P = exp(q[t, h] . kv[key] D^-0.5 - m).

    Dimensions:
        T: queries, 1 to 128. H: heads, 1 to 128. D: head_dim, up to 512; a multiple of 128 where above it.
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
        - Each core has its own queries; gathers run AHEAD queries in front of the arithmetic.
        - Selected row j = p * (K / P) + i of a query is on partition p of its i-th gather: the order of keys is free, and
          so each partition reads its indices in one piece.

    Pseudocode:
        near = [ring[ring_idxs], kv];  near_t = transpose(near)
        for t in queries of this core:
            own = far[topk_idxs[t]];  own_t = transpose(own)
            s = [q[t] near_t + near_bias[t], q[t] own_t + own_bias[t]]
            m = max(max(s), FLOOR);  p = exp(D^-0.5 (s - m));  total = sum(p) + exp(min(sink - D^-0.5 m, 87))
            o[t] = (round(p) [near, own]) / total

    Cost:
        Per query with C = D / 128 and I = ceil(K / 128): I gathers of 1 KiB rows (bf16, D = 512), C I + I transposes of K
        and P, 2 C + I matmuls of up to 512 columns and those of the window. GpSimd writes K descriptors per query, which
        bounds it: 3.4 us for K = 512 at the assumed 8 cycles per row. 6 queries x 640 rows on two cores: see HARDWARE.md.
    """
    rows, heads, dim = q.shape
    window, own_rows = ring_idxs.shape[0], kv.shape[0]
    near = window + own_rows
    chunk = min(dim, PARTITIONS)
    assert 1 <= rows <= PARTITIONS and heads <= PARTITIONS, f"q {q.shape}: at most 128 queries and 128 heads"
    assert dim <= BANK and dim % chunk == 0, f"q {q.shape}: head_dim up to 512, a multiple of 128 where above it"
    assert near <= BANK, f"ring_idxs {ring_idxs.shape}, kv {kv.shape}: at most 512 window rows"
    assert near_bias.shape == (rows, near), f"near_bias {near_bias.shape}, expected {(rows, near)}"
    assert sink.shape == (heads, 1), f"sink {sink.shape}, expected {(heads, 1)}"
    assert (far is None) == (topk_idxs is None), "far and topk_idxs come together"
    out = nl.ndarray((rows, heads, dim), q.dtype, buffer=nl.shared_hbm)
    first, count = core_share(rows)
    if count == 0:
        return out

    chosen = None
    if topk_idxs is not None:
        chosen = _choices(topk_idxs, first, count, q.dtype)
    pick_sb = _picker(count, heads, q.dtype)
    near_bias_sb = nl.ndarray((count, near), q.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=near_bias_sb, src=near_bias[first : first + count])
    sink_sb = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=sink_sb, src=sink)
    near_tiles = _near_rows(ring, ring_idxs, kv)
    gathered = []
    for t in range(min(AHEAD, count)):
        gathered.append(_gather(far, chosen, t, dim))
    near_t_sb = _columns(near_tiles, dim, chunk)
    q_t_sb = _columns(_query_rows(q, first, count), dim, chunk)

    for t in range(count):
        if t + AHEAD < count:
            gathered.append(_gather(far, chosen, t + AHEAD, dim))
        q_t = q_t_sb[:, :, t * heads : (t + 1) * heads]
        groups = [(near_tiles, _scores(q_t, near_t_sb, pick_sb[:, t, :], near_bias_sb))]
        if chosen is not None:
            own = gathered[t]
            groups.append((own, _scores(q_t, _columns(own, dim, chunk), pick_sb[:, t, :], chosen[1])))
        _attend(out[first + t], groups, sink_sb, dim)
    return out


def _choices(topk_idxs: nl.NkiTensor, first: int, count: int, dtype: str) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """The core's indices [P, count, I] int32, row j = p I + i, and their bias [count, I P] in the order of the columns."""
    selected = topk_idxs.shape[1]
    parts = -(-selected // PARTITIONS)
    assert selected <= BANK and selected % parts == 0, f"topk_idxs {topk_idxs.shape}: up to 512, a multiple of {parts}"
    per_part = selected // parts
    mine = topk_idxs[first : first + count]
    index_sb = nl.ndarray((per_part, count, parts), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=index_sb, src=mine.reshape_dim(1, (per_part, parts)).permute((1, 0, 2)))
    row_sb = nl.ndarray((count, selected), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row_sb, src=mine)
    bias_sb = nl.ndarray((count, selected), dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=bias_sb.reshape_dim(1, (parts, per_part)), data=row_sb.reshape_dim(1, (per_part, parts)).permute((0, 2, 1)),
        op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=HIDDEN,
    )  # fmt: skip
    return index_sb, bias_sb


def _picker(count: int, heads: int, dtype: str) -> nl.NkiTensor:
    """[count, count, H]: [t', t, h] is 1 where t' = t. As a matmul's stationary tile it copies row t to all heads."""
    identity_sb = nl.shared_identity_matrix(count, dtype)
    pick_sb = nl.ndarray((count, count, heads), dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=pick_sb, src=identity_sb.expand_dim(2).broadcast(2, heads))
    return pick_sb


def _gather(far: nl.NkiTensor, chosen: tuple, t: int, dim: int) -> list:
    """The selected rows of query t: one list entry per gather, zeros where the index is -1."""
    found = []
    if far is not None:
        per_part, _, parts = chosen[0].shape
        rows_sb = nl.ndarray((per_part, parts, dim), far.dtype, buffer=nl.sbuf)
        nisa.memset(dst=rows_sb, value=0.0)
        for i in range(parts):
            nisa.dma_copy(
                dst=rows_sb[:, i, :], src=far.vector_select(0, chosen[0][:, t, i : i + 1]), oob_mode=nisa.oob_mode.skip
            )
            found.append(rows_sb[:, i, :])
    return found


def _near_rows(ring: nl.NkiTensor, ring_idxs: nl.NkiTensor, kv: nl.NkiTensor) -> list:
    """The window's rows in tiles of up to 128: those of the ring by index, then the call's own."""
    found, dim = [], kv.shape[1]
    for first, count in tiles(ring_idxs.shape[0], PARTITIONS):
        index_sb = nl.ndarray((count, 1), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=index_sb, src=ring_idxs[first : first + count])
        rows_sb = nl.ndarray((count, dim), ring.dtype, buffer=nl.sbuf)
        nisa.memset(dst=rows_sb, value=0.0)
        nisa.dma_copy(dst=rows_sb, src=ring.vector_select(0, index_sb), oob_mode=nisa.oob_mode.skip)
        found.append(rows_sb)
    for first, count in tiles(kv.shape[0], PARTITIONS):
        rows_sb = nl.ndarray((count, dim), kv.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows_sb, src=kv[first : first + count])
        found.append(rows_sb)
    return found


def _query_rows(q: nl.NkiTensor, first: int, count: int) -> list:
    """The core's queries as rows (t, h) in tiles of up to 128."""
    _, heads, dim = q.shape
    flat = q.flatten_dims(0, 1)
    found = []
    for start, size in tiles(count * heads, PARTITIONS):
        rows_sb = nl.ndarray((size, dim), q.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows_sb, src=flat[first * heads + start : first * heads + start + size])
        found.append(rows_sb)
    return found


def _columns(row_tiles: list, dim: int, chunk: int) -> nl.NkiTensor:
    """Tiles of rows [n, D] as columns [D % chunk, D / chunk, all n], by transposes through PSUM."""
    total = 0
    for rows_sb in row_tiles:
        total += rows_sb.shape[0]
    columns_sb = nl.ndarray((chunk, dim // chunk, total), row_tiles[0].dtype, buffer=nl.sbuf)
    for first, count in tiles(total, BANK):
        columns_psum = []
        for _ in range(dim // chunk):
            columns_psum.append(nl.ndarray((chunk, count), columns_sb.dtype, buffer=nl.psum))
        place = 0
        for rows_sb in row_tiles:
            size = rows_sb.shape[0]
            if first <= place < first + count:
                for c in range(dim // chunk):
                    nisa.nc_transpose(
                        dst=columns_psum[c][:, place - first : place - first + size],
                        data=rows_sb[:, c * chunk : (c + 1) * chunk],
                    )
            place += size
        for c in range(dim // chunk):
            engine = nisa.engine.vector if c % 2 == 0 else nisa.engine.scalar
            nisa.tensor_copy(dst=columns_sb[:, c, first : first + count], src=columns_psum[c], engine=engine)
    return columns_sb


def _scores(q_t: nl.NkiTensor, keys_t_sb: nl.NkiTensor, pick: nl.NkiTensor, bias_sb: nl.NkiTensor) -> nl.NkiTensor:
    """q . key + bias, [H, keys] in PSUM."""
    scores_psum = nl.ndarray((q_t.shape[2], keys_t_sb.shape[2]), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=scores_psum, stationary=pick, moving=bias_sb, accumulate=False)
    for c in range(q_t.shape[1]):
        nisa.nc_matmul(dst=scores_psum, stationary=q_t[:, c, :], moving=keys_t_sb[:, c, :], accumulate=True)
    return scores_psum


def _attend(out: nl.NkiTensor, groups: list, sink_sb: nl.NkiTensor, dim: int) -> None:
    """Softmax of one query's scores over all groups of (row tiles, scores [H, n]) and the sum of values, to out [H, D]."""
    heads, scale = sink_sb.shape[0], dim**-0.5
    most_sb = nl.ndarray((heads, len(groups)), nl.float32, buffer=nl.sbuf)
    for g in range(len(groups)):
        nisa.tensor_reduce(dst=most_sb[:, g : g + 1], op=nl.maximum, data=groups[g][1], axis=1)
    shift_sb = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=shift_sb, data=most_sb[:, 0:1], op0=nl.maximum, operand0=most_sb[:, len(groups) - 1 : len(groups)],
        op1=nl.maximum, operand1=FLOOR,
    )  # fmt: skip
    nisa.tensor_scalar(dst=shift_sb, data=shift_sb, op0=nl.multiply, operand0=-scale)
    rest_sb = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=rest_sb, data=sink_sb, op0=nl.add, operand0=shift_sb, op1=nl.minimum, operand1=LARGEST_EXPONENT
    )
    nisa.activation(dst=rest_sb, op=nl.exp, data=rest_sb)
    total_sb = nl.ndarray((heads, len(groups)), nl.float32, buffer=nl.sbuf)
    out_psum = nl.ndarray((heads, dim), nl.float32, buffer=nl.psum)
    weights = []
    for g in range(len(groups)):
        row_tiles, scores_psum = groups[g]
        p_sb = nl.ndarray(scores_psum.shape, row_tiles[0].dtype, buffer=nl.sbuf)
        nisa.activation(
            dst=p_sb, op=nl.exp, data=scores_psum, bias=shift_sb, scale=scale, reduce_op=nl.add,
            reduce_res=total_sb[:, g : g + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        place = 0
        for rows_sb in row_tiles:
            size = rows_sb.shape[0]
            p_t_psum = nl.ndarray((size, heads), p_sb.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=p_t_psum, data=p_sb[:, place : place + size])
            p_t_sb = nl.ndarray((size, heads), p_sb.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=p_t_sb, src=p_t_psum)
            weights.append((p_t_sb, rows_sb))
            place += size
    for i in range(len(weights)):
        nisa.nc_matmul(dst=out_psum, stationary=weights[i][0], moving=weights[i][1], accumulate=i > 0)
    for g in range(len(groups)):
        nisa.tensor_tensor(dst=rest_sb, data1=rest_sb, data2=total_sb[:, g : g + 1], op=nl.add)
    nisa.reciprocal(dst=rest_sb, data=rest_sb)
    out_sb = nl.ndarray((heads, dim), out.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=out_sb, data=out_psum, op0=nl.multiply, operand0=rest_sb)
    nisa.dma_copy(dst=out, src=out_sb)
