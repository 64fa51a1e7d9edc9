# SPDX-License-Identifier: Apache-2.0
"""Attention and the indexer for one row of a decode step on the CPU, reading the caches where they lie (numba)."""

import numpy as np
from numba import prange

from .compile import exact, threaded
from .matrix_rows import strip, widen
from .rowwise import F32, ONE, ZERO, exp, rotate_row, round_bf16, round_row, row_sum


@exact
def _copy(stored, out):  # type: ignore[no-untyped-def]
    for j in range(out.shape[0]):
        out[j] = widen(stored[j])


@threaded
def attend(q, own, ring, cache, chosen, table, sink, position, first, window, scale, rounds, out):  # type: ignore[no-untyped-def]
    """out [H, D] of one query q [H, D] at ``position`` (attention.attend).

    own [T, D]: window KV of the call's tokens from position ``first`` on; ring [C + 1, D]: of earlier ones, by position;
    cache [G, D] and chosen [k]: compressed KV and the selected groups, -1 for none; table [2, R] rotates q and, back, out.
    """
    heads, dim = q.shape
    keys = np.empty((window + chosen.shape[0], dim), F32)
    count = 0
    for p in range(max(position - window + 1, 0), position + 1):
        _copy(own[p - first] if p >= first else ring[p % (ring.shape[0] - 1)], keys[count])
        count += 1
    for j in range(chosen.shape[0]):
        if chosen[j] >= 0:
            _copy(cache[chosen[j]], keys[count])
            count += 1
    for head in prange(heads):
        turned, s = np.empty(dim, F32), np.empty(count, F32)
        rotate_row(q[head], table, ONE, rounds, turned)
        strip(keys, 0, count, turned, False, s)
        highest = F32(-1e30)
        for j in range(count):
            s[j] *= scale
            highest = max(highest, s[j])
        for j in range(count):
            s[j] = exp(s[j] - highest)
        total = row_sum(s) + exp(sink[head] - highest)
        if rounds:
            round_row(s)
        o = np.zeros(dim, F32)
        for j in range(count):
            weight, key = s[j], keys[j]
            for i in range(dim):
                o[i] += weight * key[i]
        for i in range(dim):
            o[i] /= total
        if rounds:
            round_row(o)
        rotate_row(o, table, -ONE, rounds, out[head])


@threaded
def index_scores(query, weights, keys, rounds, out):  # type: ignore[no-untyped-def]
    """out [n] = sum over heads of weights [h] * relu(query [h, D] . keys [D, G][:, :n]), as indexer.index_scores rounds."""
    tile = 128
    for block in prange(-(-out.shape[0] // tile)):
        first, stop = block * tile, min(block * tile + tile, out.shape[0])
        total = out[first:stop]
        total[:] = ZERO
        for head in range(query.shape[0]):
            dots = np.zeros(stop - first, F32)
            for d in range(query.shape[1]):
                factor, key = query[head, d], keys[d, first:stop]
                for g in range(dots.shape[0]):
                    dots[g] += factor * widen(key[g])
            if rounds:
                round_row(dots)
            for g in range(dots.shape[0]):
                product = weights[head] * max(dots[g], ZERO)
                total[g] += round_bf16(product) if rounds else product
        if rounds:
            round_row(total)
