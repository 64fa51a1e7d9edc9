# SPDX-License-Identifier: Apache-2.0
"""Compiled loops over rows for the CPU: what stands between two matrix products, in one pass each (numba).

Each function computes what its namesake in PyTorch does; dispatch.py names the pairs and tests compare them. A row's
loop is the same machine code whatever the number of rows, so its bits do not depend on its neighbours. Arrays are fp32;
``rounds`` says whether results are rounded to bf16, ``quantizes`` whether they pass through the fp8 QDQ.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from .compile import exact, reassociated, threaded

F32 = np.float32
EXPONENT, ONE_EXPONENT = 0x7F800000, 1 << 23
ONE, ZERO = F32(1.0), F32(0.0)
FP8_FLOOR, FP8_INVERSE = F32(1e-4), F32(1.0 / 448.0)
FP8_MAGIC = ((23 - 3) << 23) + (1 << 22)
FP4_FLOOR, FP4_INVERSE = F32(6.0 * 2.0**-126), F32(1.0 / 6.0)
FP4_MAGIC = ((23 - 1) << 23) + (1 << 22)
LOG2_E, LN2_HIGH, LN2_LOW = F32(1.4426950408889634), F32(0.693145751953125), F32(1.428606765330187e-06)


@intrinsic
def as_int(context, x):  # type: ignore[no-untyped-def]
    """The bits of a float32 as int32."""
    return types.int32(types.float32), lambda c, builder, s, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def as_float(context, x):  # type: ignore[no-untyped-def]
    """The float32 of int32 bits."""
    return types.float32(types.int32), lambda c, builder, s, args: builder.bitcast(args[0], ir.FloatType())


@exact
def round_bf16(x):  # type: ignore[no-untyped-def]
    """A finite fp32 value rounded to bf16, to nearest even."""
    bits = as_int(x)
    return as_float(np.int32((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000))


@exact
def round_row(x):  # type: ignore[no-untyped-def]
    """A row rounded to bf16 in place."""
    for j in range(x.shape[0]):
        x[j] = round_bf16(x[j])


@exact
def exp(x):  # type: ignore[no-untyped-def]
    """exp(x) of fp32 within 1 ulp where it is normal, 0 below: 2^n times a polynomial on [-ln2/2, ln2/2]."""
    x = min(max(x, F32(-104.0)), F32(88.7))
    n = np.rint(x * LOG2_E)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = F32(1.9875691500e-4)
    p = p * r + F32(1.3981999507e-3)
    p = p * r + F32(8.3334519073e-3)
    p = p * r + F32(4.1665795894e-2)
    p = p * r + F32(1.6666665459e-1)
    p = p * r + F32(5.0000001201e-1)
    p = p * (r * r) + r + ONE
    power = np.int32(n)
    return p * as_float(np.int32((power + 127) << 23)) if power > -127 else ZERO


@exact
def quantise_groups(x, floor, inverse, below, magic_bits, out):  # type: ignore[no-untyped-def]
    """QDQ of one row per 32 with power-of-two scales (formats.round_to_grid under formats._power_of_two_scale)."""
    for first in range(0, x.shape[0], 32):
        highest = ZERO
        for j in range(first, first + 32):
            highest = max(highest, abs(x[j]))
        ratio = as_int(max(highest, floor) * inverse)
        lowest = (ratio + (ONE_EXPONENT - 1) - below * ONE_EXPONENT) & EXPONENT
        for j in range(first, first + 32):
            magic = as_float(np.int32(max(as_int(x[j]) & EXPONENT, lowest) + magic_bits))
            out[j] = (x[j] + magic) - magic


@exact
def quantise_row(x, out):  # type: ignore[no-untyped-def]
    """fp8 QDQ of one row (formats.qdq_fp8)."""
    quantise_groups(x, FP8_FLOOR, FP8_INVERSE, 6, FP8_MAGIC, out)


@reassociated
def square_sum(x):  # type: ignore[no-untyped-def]
    """The sum of squares of a row."""
    total = ZERO
    for j in range(x.shape[0]):
        total += x[j] * x[j]
    return total


@exact
def normalise_row(x, weight, eps, rounds, out):  # type: ignore[no-untyped-def]
    """RMSNorm of one row (linear.rms_norm)."""
    scale = ONE / np.sqrt(square_sum(x) / F32(x.shape[0]) + eps)
    for j in range(x.shape[0]):
        out[j] = x[j] * scale * weight[j]
    if rounds:
        round_row(out)


@exact
def rotate_row(x, table, sign, rounds, out):  # type: ignore[no-untyped-def]
    """Rotates the last columns of one row (rope.rotate)."""
    plain = x.shape[0] - table.shape[1]
    out[:plain] = x[:plain]
    for j in range(0, table.shape[1], 2):
        even, odd = x[plain + j], x[plain + j + 1]
        cos, sin = table[0, j], table[1, j + 1] * sign
        out[plain + j] = even * cos - odd * sin
        out[plain + j + 1] = odd * cos + even * sin
    if rounds:
        round_row(out[plain:])


@threaded
def quantise(x, out):  # type: ignore[no-untyped-def]
    """x [n, k] through the fp8 QDQ."""
    for row in prange(x.shape[0]):
        quantise_row(x[row], out[row])


@threaded
def quantise_index(x, out):  # type: ignore[no-untyped-def]
    """x [n, k] through the fp4 QDQ of index keys and queries (formats.qdq_fp4_ue8m0)."""
    for row in prange(x.shape[0]):
        quantise_groups(x[row], FP4_FLOOR, FP4_INVERSE, 0, FP4_MAGIC, out[row])


@threaded
def normalise(x, weight, eps, rounds, out):  # type: ignore[no-untyped-def]
    """x [n, k] through RMSNorm."""
    for row in prange(x.shape[0]):
        normalise_row(x[row], weight, eps, rounds, out[row])


@threaded
def rotate(x, table, sign, rounds, out):  # type: ignore[no-untyped-def]
    """x [n, heads, D] by table [n, 2, R]."""
    for row in prange(x.shape[0]):
        for head in range(x.shape[1]):
            rotate_row(x[row, head], table[row], sign, rounds, out[row, head])


@threaded
def collapse(x, pre, weight, eps, rounds, h):  # type: ignore[no-untyped-def]
    """Streams x [n, hc, d] to h = norm(sum of pre * x) [n, d]."""
    for row in prange(x.shape[0]):
        total = h[row]
        total[:] = ZERO
        for source in range(x.shape[1]):
            share, stream = pre[row, source], x[row, source]
            for j in range(x.shape[2]):
                total[j] += share * stream[j]
        if rounds:
            round_row(total)
        normalise_row(h[row], weight, eps, rounds, h[row])


@threaded
def expand(y, residual, post, comb, rounds, out):  # type: ignore[no-untyped-def]
    """out[j] = post[j] * y + sum over i of comb[i, j] * residual[i]; y [n, d], residual and out [n, hc, d]."""
    for row in prange(y.shape[0]):
        for to in range(post.shape[1]):
            total = out[row, to]
            for j in range(y.shape[1]):
                total[j] = post[row, to] * y[row, j]
            for source in range(post.shape[1]):
                weight, stream = comb[row, source, to], residual[row, source]
                for j in range(y.shape[1]):
                    total[j] += weight * stream[j]
            if rounds:
                round_row(total)


@threaded
def mixes(raw, x, scale, base, rounds, eps, norm_eps, pre, post, comb):  # type: ignore[no-untyped-def]
    """The coefficients of one sublayer: raw = flat(x) fn^T [n, (2 + hc) hc], x [n, hc * d] (hyper_connections.mixes)."""
    hc = pre.shape[1]
    for row in prange(raw.shape[0]):
        norm = ONE / np.sqrt(square_sum(x[row]) / F32(x.shape[1]) + norm_eps)
        for i in range(hc):
            z = raw[row, i] * norm * scale[i] + base[i]
            pre[row, i] = ONE / (ONE + exp(-z)) + eps
            z = raw[row, hc + i] * norm * scale[hc + i] + base[hc + i]
            post[row, i] = F32(2.0) / (ONE + exp(-z))
        c = comb[row]
        for i in range(hc):
            highest = F32(-np.inf)
            for j in range(hc):
                at = 2 * hc + i * hc + j
                c[i, j] = raw[row, at] * norm * scale[at] + base[at]
                highest = max(highest, c[i, j])
            total = ZERO
            for j in range(hc):
                c[i, j] = exp(c[i, j] - highest)
                total += c[i, j]
            for j in range(hc):
                c[i, j] = c[i, j] / total + eps
        for half in range(2 * rounds + 1):
            if half % 2 == 0:
                for j in range(hc):
                    total = ZERO
                    for i in range(hc):
                        total += c[i, j]
                    for i in range(hc):
                        c[i, j] /= total + eps
            else:
                for i in range(hc):
                    total = ZERO
                    for j in range(hc):
                        total += c[i, j]
                    for j in range(hc):
                        c[i, j] /= total + eps


@threaded
def swiglu(gate_up, routing, limit, rounds, quantizes, out):  # type: ignore[no-untyped-def]
    """gate_up [n, 2I] and routing [n] to silu(gate) * up * routing [n, I], as experts.swiglu."""
    inter = out.shape[1]
    for row in prange(gate_up.shape[0]):
        weight, h = routing[row], out[row]
        most = limit if limit > ZERO else F32(np.inf)
        for j in range(inter):
            gate, up = min(gate_up[row, j], most), min(max(gate_up[row, inter + j], -most), most)
            h[j] = gate / (ONE + exp(-gate)) * up * weight
        if rounds:
            round_row(h)
        if quantizes:
            quantise_row(out[row], out[row])


@reassociated
def row_sum(x):  # type: ignore[no-untyped-def]
    """The sum of a row."""
    total = ZERO
    for j in range(x.shape[0]):
        total += x[j]
    return total


@threaded
def route(logits, bias, normalises, factor, ids, weights):  # type: ignore[no-untyped-def]
    """logits [n, E] and bias [E] to expert ids [n, k], best first, and their routing weights [n, k] (moe.route)."""
    experts, k = logits.shape[1], ids.shape[1]
    for row in prange(logits.shape[0]):
        score, left = np.empty(experts, F32), np.empty(experts, F32)
        for e in range(experts):
            x = logits[row, e]
            soft = max(x, ZERO) + F32(np.log1p(exp(-abs(x))))
            score[e] = np.sqrt(soft) if x >= F32(-16.0) else F32(np.exp(x * F32(0.5)))
            left[e] = score[e] + bias[e]
        total = ZERO
        for i in range(k):
            best = 0
            for e in range(1, experts):
                if left[e] > left[best]:
                    best = e
            left[best] = F32(-np.inf)
            ids[row, i] = best
            weights[row, i] = score[best]
            total += score[best]
        for i in range(k):
            weight = weights[row, i] / (total + F32(1e-20)) if normalises else weights[row, i]
            weights[row, i] = weight * factor


@threaded
def top_ascending(scores, visible, out):  # type: ignore[no-untyped-def]
    """The best visible scores [n, G] as ascending positions out [n, k], -1 where fewer (topk.top_ascending)."""
    n, k = scores.shape[1], out.shape[1]
    for row in prange(scores.shape[0]):
        keys = np.empty(n, np.int64)
        count = 0
        for j in range(n):
            if visible[row, j]:
                bits = np.int64(as_int(scores[row, j] + ZERO))
                keys[count] = (bits ^ 0x7FFFFFFF if bits < 0 else bits) * n - j
                count += 1
        found = min(count, k)
        if count > k:
            keys[:count] = np.partition(keys[:count], count - k)
        places = np.sort((-keys[count - found : count]) % n)
        out[row, :found] = places
        out[row, found:] = -1
