# SPDX-License-Identifier: Apache-2.0
"""Attention over rows that were gathered beforehand: each query has its keys in one piece. Keys are the values."""

import nki
import nki.isa as nisa
import nki.language as nl

from .attend import AHEAD, add_own, check, finish, groups_of, start_group
from .split import PARTITIONS, core_share, tiles

MOST_KEYS = 1024
"""Of a query: two banks of scores."""


@nki.jit
def gathered_attention(q: nl.NkiTensor, kv: nl.NkiTensor, bias: nl.NkiTensor, sink: nl.NkiTensor) -> nl.NkiTensor:
    """o[t, h] = sum of P[j] kv[t, j] / (sum of P + exp(sink[h] - m)), P[j] = exp(D^-0.5 (q[t, h] . kv[t, j] + bias[t, j]) - m).

    For rows that something else gathers, for instance because a cache holds them in another format. ``sparse_attention``
    gathers by index itself and reads the window once for all queries.

    Dimensions:
        T: queries, 1 to 128. H: heads, 1 to 128. D: head_dim, even, up to 512; a multiple of 128 where above it.
        K: rows of a query, window and selected ones, up to 1024; a multiple of I = ceil(K / 128).

    Args (dtype is bfloat16 or float32, the same for all that say so):
        q [T, H, D] dtype @ HBM, rotated. kv [T, K, D] dtype @ HBM, finite also where ``bias`` hides it.
        bias [T, K] dtype @ HBM, 0 for a key, -1e30 (attend.HIDDEN) for a place without one.
        sink [H, 1] float32 @ HBM.

    Returns:
        o [T, H, D] dtype @ shared HBM. A query without a key gives zeros.

    Notes:
        Reference: attention.softmax_attention; the rounding is that of ``sparse_attention``, with which it shares attend.py.
        Each core has its own queries. Row j = p I + i of a query lies on partition p, so that a partition's rows are one piece
        of memory.

    Pseudocode:
        for queries t of this core:
            s = q[t] transpose(kv[t]) + bias[t];  m, p, total as in sparse_attention;  o[t] = round(p) kv[t] / total

    Cost:
        With C = D / 128, per query: 2 dma_copy, C I transposes, copied in two halves, and (C + 1) I matmuls. Per group: C + I
        transposes and ceil(I / 4) matmuls for the bias. Bound: the tensor engine, 3.4 us per query of 640 rows, or the DMA of
        K rows of D values, 1.8 us. Predicted for 6 queries x 640 rows, 8 heads, two cores: 17.3 us, 10.6 us of the tensor
        engine and 6.8 us of DMA (5.6 us by bytes alone).
    """
    check(q, sink)
    rows, heads, dim = q.shape
    keys = kv.shape[1]
    pieces = -(-keys // PARTITIONS)
    assert 1 <= keys <= MOST_KEYS and keys % pieces == 0, f"kv {kv.shape}: 1 to {MOST_KEYS} rows per query, in {pieces}s"
    assert kv.shape == (rows, keys, dim), f"kv {kv.shape}, expected {(rows, keys, dim)}"
    assert bias.shape == (rows, keys), f"bias {bias.shape}, expected {(rows, keys)}"
    out = nl.ndarray((rows, heads, dim), q.dtype, buffer=nl.shared_hbm)
    first, count = core_share(rows)
    if count == 0:
        return out

    sizes = (keys // pieces, pieces)
    groups = groups_of(count, heads, pieces * dim * (2 if q.dtype == nl.bfloat16 else 4))
    started: list = []
    own: list = []
    before: list = []
    for g in range(len(groups) + 1):
        if g < len(groups):
            part = slice(first + groups[g][0], first + groups[g][0] + groups[g][1])
            bias_sb = nl.ndarray((groups[g][1], keys), bias.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=bias_sb, src=bias[part])
            own_bias = bias_sb.reshape_dim(1, sizes).permute((0, 2, 1))
            started.append(start_group(out[part], q[part], sink, None, own_bias))
        if g > 0:
            start, members = groups[g - 1]
            while len(own) < min(start + members + AHEAD, count):
                own.append(_load(kv[first + len(own)], sizes))
            before = add_own(started[g - 1], own[start : start + members], before)
    finish(before)
    return out


def _load(kv: nl.NkiTensor, sizes: tuple) -> list:
    """A query's rows [P I, D] @ HBM as I tiles [P, D], in two DMAs; sizes are P and I."""
    parts, pieces = sizes
    source = kv.reshape_dim(0, sizes)
    found = []
    for first, count in tiles(pieces, -(-pieces // 2)):
        rows_sb = nl.ndarray((parts, count, kv.shape[1]), kv.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows_sb, src=source[:, first : first + count])
        for i in range(count):
            found.append(rows_sb[:, i, :])
    return found
