# SPDX-License-Identifier: Apache-2.0
"""Gathered sparse attention: softmax over the window and over rows chosen by index, with a sink. Keys are the values."""

import nki
import nki.isa as nisa
import nki.language as nl

from .attend import AHEAD, HIDDEN, add_own, check, finish, groups_of, start_group
from .layout import columns, gather
from .split import BANK, PARTITIONS, core_share, tiles

INDICES = 16
"""Queries whose indices come in one DMA, 2,048 descriptors."""


@nki.jit
def sparse_attention(
    q: nl.NkiTensor, ring: nl.NkiTensor, ring_idxs: nl.NkiTensor, kv: nl.NkiTensor, near_bias: nl.NkiTensor,
    sink: nl.NkiTensor, table: nl.NkiTensor, far: nl.NkiTensor | None = None, topk_idxs: nl.NkiTensor | None = None,
) -> nl.NkiTensor:  # fmt: skip
    """o[t, h] = sum of P[t, h, key] kv[key] / (sum of P + exp(sink[h] - m)), P = exp(q[t, h] . kv[key] D^-0.5 - m).

    q is rotated before, o rotated back: the rotary embedding costs no launch of its own.

    Dimensions:
        T: queries, 1 to 128. H: heads, 1 to 128. D: head_dim, even, up to 512; a multiple of 128 where above it.
        R: ring rows that the call's queries may see (sliding_window - 1). S: the call's own rows; R + S <= 512.
        N: compressed rows. K: selected rows per query, up to 512; a multiple of ceil(K / 128).

    Args (dtype is bfloat16 or float32, the same for all that say so):
        q [T, H, D] dtype @ HBM, not rotated.
        ring [C, D] dtype @ HBM, window KV of earlier positions.
        ring_idxs [R, 1] int32 @ HBM, rows of ``ring``, -1 for none.
        kv [S, D] dtype @ HBM, window KV of the call's own tokens.
        near_bias [T, R + S] dtype @ HBM, 0 where query t sees the row, else -1e30 (HIDDEN).
        sink [H, 1] float32 @ HBM.
        table [T, 2, R] float32 @ HBM: a query's row of rope.rope_table, R even, to D.
        far [N, D] dtype @ HBM and topk_idxs [T, K] int32 @ HBM, rows of ``far``, -1 for none; or neither.

    Returns:
        o [T, H, D] dtype @ shared HBM. A query without a key gives zeros.

    Notes:
        - Reference: rope.rotate, attention.softmax_attention, rope.rotate back; q and o are rounded in between. The maximum
          leaves the sink out, P is rounded before it meets the values, the denominator is summed before that rounding.
        - Rows of -1 are not read: their tile was zeroed and the DMA skips them, so unused memory may hold NaN.
        - Each core has its own queries, in groups that share one softmax (attend.py), from the end 1, 2, 4 and so on: the
          values of one group are added up while the rows of the next arrive; only the last query's softmax is waited for.
        - Selected row j = p I + i of a query, I = ceil(K / 128), is on partition p of its i-th gather: the order of keys is
          free, and so each partition reads its indices in one piece.

    Pseudocode:
        q = rotate(q)
        near = [ring[ring_idxs], kv];  near_t = transpose(near)
        for queries t of a group of this core:
            own[t] = far[topk_idxs[t]], AHEAD queries early;  own_t = transpose(own[t])
            s[t] = [q[t] near_t + near_bias[t], q[t] own_t + own_bias[t]]
        m = max(max(s), FLOOR);  p = exp(D^-0.5 (s - m));  total = sum(p) + exp(min(sink - D^-0.5 m, 87))
        o = rotate_back(round((round(p) [near, own]) / total))

    Cost:
        With C = D / 128 and w window tiles of up to 128 rows, per query: I gathers, C I transposes, copied in two halves, and
        (C + 1) I matmuls. Per group: C + w + I transposes and C + w + 2 matmuls; per core C w transposes of the window.
        Bound: a query's DMA, K rows of D values (1.4 us at 512 x 1 KiB without descriptors), or GpSimd, which writes K
        descriptors (3.4 us at the assumed 8 cycles each). Predicted for 6 queries x 640 rows, 8 heads, two cores: 23.3 us,
        2.9 times the 8.1 us of DMA; 11.1 us of GpSimd, 10.4 us of the tensor engine, 9.2 us of VectorE. 18 us of it are the
        indices' DMA, GpSimd, the last gather and the output's DMA, one after the other. The rotations, 16 VectorE
        instructions, take 1 us of it, where two launches of ``rotate`` would take 10.4 us.
    """
    check(q, sink)
    rows, heads, dim = q.shape
    rotary = table.shape[2]
    assert table.shape == (rows, 2, rotary), f"table {table.shape}, expected {(rows, 2, rotary)}"
    assert rotary % 2 == 0 and rotary <= dim, f"table {table.shape}: an even number of columns, at most {dim}"
    near = ring_idxs.shape[0] + kv.shape[0]
    assert near <= BANK, f"ring_idxs {ring_idxs.shape}, kv {kv.shape}: at most 512 window rows"
    assert near_bias.shape == (rows, near), f"near_bias {near_bias.shape}, expected {(rows, near)}"
    assert (far is None) == (topk_idxs is None), "far and topk_idxs come together"
    gathers, own_bytes = 0, 0
    if topk_idxs is not None:
        selected = topk_idxs.shape[1]
        gathers = -(-selected // PARTITIONS)
        assert 1 <= selected <= BANK and selected % gathers == 0, f"topk_idxs {topk_idxs.shape}: to 512, in {gathers}s"
        own_bytes = gathers * dim * (2 if q.dtype == nl.bfloat16 else 4)
    out = nl.ndarray((rows, heads, dim), q.dtype, buffer=nl.shared_hbm)
    first, count = core_share(rows)
    if count == 0:
        return out

    near_tiles = _near_rows(ring, ring_idxs, kv)
    groups = groups_of(count, heads, own_bytes)
    started: list = []
    own: list = []
    before: list = []
    end = 0
    for g in range(len(groups) + 1):
        while topk_idxs is not None and len(own) < min(end + AHEAD, count):
            at = first + len(own)
            if len(own) % INDICES == 0:
                index_sb = _indices(topk_idxs[at : at + min(INDICES, count - len(own))], gathers)
            own.append(gather(far, index_sb[:, len(own) % INDICES, :]))
        if g < len(groups):
            start, members = groups[g]
            end, part = start + members, slice(first + start, first + start + members)
            own_bias = None if topk_idxs is None else _hidden(topk_idxs[part], gathers, q.dtype)
            if g == 0:
                near_t_sb = columns(near_tiles, dim, min(dim, PARTITIONS))
            bias_sb = nl.ndarray((members, near), q.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=bias_sb, src=near_bias[part])
            started.append(start_group(out[part], q[part], sink, (near_tiles, near_t_sb, bias_sb), own_bias, table[part]))
        if g > 0:
            start, members = groups[g - 1]
            before = add_own(started[g - 1], own[start : start + members], before)
    finish(before)
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


def _indices(chosen: nl.NkiTensor, gathers: int) -> nl.NkiTensor:
    """chosen [M, K] int32 @ HBM as [P, M, I], selected row p I + i of a query at [p, :, i]."""
    members, selected = chosen.shape
    index_sb = nl.ndarray((selected // gathers, members, gathers), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=index_sb, src=chosen.reshape_dim(1, (selected // gathers, gathers)).permute((1, 0, 2)))
    return index_sb


def _hidden(chosen: nl.NkiTensor, gathers: int, dtype: str) -> nl.NkiTensor:
    """The bias [M, I, P] of chosen [M, K] int32 @ HBM, in the order of the gathers: HIDDEN where the index is -1."""
    members, selected = chosen.shape
    row_sb = nl.ndarray((members, selected), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row_sb, src=chosen)
    bias_sb = nl.ndarray((members, gathers, selected // gathers), dtype, buffer=nl.sbuf)
    in_order = row_sb.reshape_dim(1, (selected // gathers, gathers)).permute((0, 2, 1))
    nisa.tensor_scalar(dst=bias_sb, data=in_order, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=HIDDEN)
    return bias_sb
