# SPDX-License-Identifier: Apache-2.0
"""Matrix products for the few rows of a decode step on the CPU (numba).

Weights are bf16 (seen as uint16) or fp32 and are read once for all rows. Eight weight rows are read side by side, each a
stream of consecutive rows, which keeps the memory busier than one stream does. A dot product's order of addition is fixed:
it depends neither on the number of rows nor of threads.
"""

import numpy as np
from numba import prange, types
from numba.extending import overload

from .compile import exact, reassociated, threaded
from .rowwise import F32, ZERO, as_float, round_bf16, swiglu

SIDE, STRIP = 8, 64
"""Weight rows read side by side, and per work item: each of the eight streams runs on through STRIP / SIDE rows."""

swiglu_alone = swiglu.alone  # type: ignore[attr-defined]


def widen(w):  # type: ignore[no-untyped-def]
    """One stored value as fp32."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always")
def _widen(w):  # type: ignore[no-untyped-def]
    return (lambda w: w) if isinstance(w, types.Float) else (lambda w: as_float(np.int32(w) << 16))


@reassociated
def dot_side(w, first, step, x, out):  # type: ignore[no-untyped-def]
    """out [r] = w [r] x for the eight rows r = first, first + step, ...; w [n, k], x [k]."""
    r1, r2, r3, r4 = first + step, first + 2 * step, first + 3 * step, first + 4 * step
    r5, r6, r7 = first + 5 * step, first + 6 * step, first + 7 * step
    w0, w1, w2, w3, w4, w5, w6, w7 = w[first], w[r1], w[r2], w[r3], w[r4], w[r5], w[r6], w[r7]
    a = b = c = d = e = f = g = h = ZERO
    for j in range(x.shape[0]):
        v = x[j]
        a += widen(w0[j]) * v
        b += widen(w1[j]) * v
        c += widen(w2[j]) * v
        d += widen(w3[j]) * v
        e += widen(w4[j]) * v
        f += widen(w5[j]) * v
        g += widen(w6[j]) * v
        h += widen(w7[j]) * v
    out[first], out[r1], out[r2], out[r3] = a, b, c, d
    out[r4], out[r5], out[r6], out[r7] = e, f, g, h


@reassociated
def dot(w, x):  # type: ignore[no-untyped-def]
    """The product of two rows [k]."""
    total = ZERO
    for j in range(x.shape[0]):
        total += widen(w[j]) * x[j]
    return total


@exact
def strip(w, first, stop, x, rounds, out):  # type: ignore[no-untyped-def]
    """out [first:stop] = w [first:stop] x for w [n, k], x [k], out [n]."""
    step = (stop - first) // SIDE
    for offset in range(step):
        dot_side(w, first + offset, step, x, out)
    for row in range(first + step * SIDE, stop):
        out[row] = dot(w[row], x)
    if rounds:
        for row in range(first, stop):
            out[row] = round_bf16(out[row])


@threaded
def linear(x, w, rounds, out):  # type: ignore[no-untyped-def]
    """out [r, n] = x [r, k] w [n, k]^T."""
    n = w.shape[0]
    for item in prange(-(-n // STRIP)):
        first, stop = item * STRIP, min(item * STRIP + STRIP, n)
        for row in range(x.shape[0]):
            strip(w, first, stop, x[row], rounds, out[row])


@threaded
def grouped(x, w, rounds, out):  # type: ignore[no-untyped-def]
    """out [r, G, n] = x [r, G, k] w [G, n, k]^T, group by group."""
    n = w.shape[1]
    strips = -(-n // STRIP)
    for item in prange(w.shape[0] * strips):
        group, first = item // strips, item % strips * STRIP
        for row in range(x.shape[0]):
            strip(w[group], first, min(first + STRIP, n), x[row, group], rounds, out[row, group])


@threaded
def one_expert(x, w13, w2, share, limit, rounds, whole, quantizes, out):  # type: ignore[no-untyped-def]
    """out [r, d] = share * W2 swiglu(W13 x) for every row of x [r, d] fp32; w13 [1, 2I, d], w2 [1, d, I].

    whole and share as in expert_bank.ExpertBank.
    """
    rows, width, dim = x.shape[0], w13.shape[1], out.shape[1]
    gate_up, h = np.empty((rows, width), F32), np.empty((rows, width // 2), F32)
    for item in prange(-(-width // STRIP)):
        first, stop = item * STRIP, min(item * STRIP + STRIP, width)
        for row in range(rows):
            strip(w13[0], first, stop, x[row], rounds, gate_up[row])
    swiglu_alone(gate_up, np.ones(rows, F32), limit, rounds, quantizes, h)
    for item in prange(-(-dim // STRIP)):
        first, stop = item * STRIP, min(item * STRIP + STRIP, dim)
        for row in range(rows):
            strip(w2[0], first, stop, h[row], rounds and whole, out[row])
            for j in range(first, stop):
                out[row, j] *= share


@threaded
def experts(x, ids, routing, w13, w2, shared, limit, rounds, whole, quantizes, out):  # type: ignore[no-untyped-def]
    """out [d] = sum over the experts ids [k] of W2 swiglu(W13 x, routing), plus ``shared`` [d], as experts.local_experts says.

    x [d] fp32, routing [k], w13 [E, 2I, d], w2 [E, d, I]; whole as in expert_bank.ExpertBank.
    """
    k, width, dim = ids.shape[0], w13.shape[1], out.shape[0]
    gate_up, h, y = np.empty((k, width), F32), np.empty((k, width // 2), F32), np.empty((k + 1, dim), F32)
    strips = -(-width // STRIP)
    for item in prange(k * strips):
        i, first = item // strips, item % strips * STRIP
        strip(w13[ids[i]], first, min(first + STRIP, width), x, rounds, gate_up[i])
    swiglu_alone(gate_up, routing, limit, rounds, quantizes, h)
    strips = -(-dim // STRIP)
    for item in prange(k * strips):
        i, first = item // strips, item % strips * STRIP
        strip(w2[ids[i]], first, min(first + STRIP, dim), h[i], rounds and whole, y[i])
    y[k] = shared
    out[:] = y[0]
    for i in range(1, k + 1):
        for j in range(dim):
            out[j] += y[i, j]
