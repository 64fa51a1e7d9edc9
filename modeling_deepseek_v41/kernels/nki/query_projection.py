# SPDX-License-Identifier: Apache-2.0
"""The attention's input projections in one launch: queries, window KV as cached, and what compressor and indexer take."""

import nki
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .exchange import exchange
from .fold import same_row
from .linear_stream import check, check_weight, project, store, turned_rows
from .low_rank import check_low, share_sums, slot_tiles
from .slot_norm import slot_norm
from .slots import MOST_ROWS, SLOTS, turn_slots
from .split import PARTITIONS, tiles
from .window_kv import check_window_kv, window_kv


@nki.jit
def query_projection(
    x: nl.NkiTensor, table: nl.NkiTensor, wq_a: nl.NkiTensor, q_norm: nl.NkiTensor, wkv: nl.NkiTensor, kv_norm: nl.NkiTensor,
    wq_b: nl.NkiTensor, of_qr: nl.NkiTensor | None = None, of_x: nl.NkiTensor | None = None,
    second_of_x: nl.NkiTensor | None = None, third_of_x: nl.NkiTensor | None = None, columns: tuple = (), rounds: tuple = (),
    eps: float = 0.0, quantize: bool = True,
) -> tuple:  # fmt: skip
    """Window KV of wkv(x) and q = wq_b(qr), x through the QDQ, qr = qdq(norm(wq_a(x))); further weights of qr, and of plain x.

    For decode. All that a layer's attention, compressor and indexer read of x is one stream of weights. What takes x as it is
    comes first, it hides the QDQ; wkv hides the exchange of what the norm and wq_b need of the other core's half; wq_b hides
    what is done to the window KV.

    Dimensions:
        M: rows, 1 to 32. K: columns of x, a multiple of 128. C: cores. L: q_lora_rank, a multiple of 128 C. D: head_dim, a
        multiple of 128 C. R: rotary columns, even, at most 128. N: a weight's output columns. S: its columns per core.

    Args:
        x [M, K] bf16 @ HBM. table [M, 2, R] fp32 @ HBM: a row's row of rope.rope_table.
        q_norm [1, L], kv_norm [1, D] fp32 @ HBM.
        wq_a, wkv, of_x, second_of_x, third_of_x [C, 128, K / 128 S], wq_b, of_qr [C, 128, L / 128 S] bf16 @ HBM:
        linear_layout.pack. A layer without an indexer has the first seven operands; one with it goes on, up to third_of_x.
        columns: N of wq_b and each weight that follows. rounds: of each of_x, whether the result is rounded to bf16.
        eps: of both norms. quantize: the QDQs of x and of qr.

    Returns:
        A tuple of the window KV [M, D] as it is cached, q [M, N], and [M, N] of each weight that follows; bf16 or, where of_x
        does not round, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear, linear.rms_norm, formats.qdq_fp8, rope.rotate. A core has half of wq_a's columns and of wkv's,
        in slots (slots.py). The cores exchange sums of squares of both (slot_norm.py), and their halves of qr.

    Pseudocode:
        for each of_x: out = round(x of_x);  x = qdq(x);  l = round(x wq_a[own columns])
        s = rsqrt((sum(l^2) + the other core's) / L + eps);  qr = qdq(round(l s q_norm))
        kv = round(x wkv[own columns]);  kv = round(kv s' kv_norm), s' as s;  kv = qdq(rotate(kv, table))
        q, of_qr: out[:, own columns] = round([transpose(qr), the other core's]^T weight)

    Cost:
        Per core: K (L + D) / (C 128^2) matmuls of 128 columns, K / 128 or L / 128 times ceil(N / 512 C) of up to 512 for each
        weight that follows. Bound: the weights' bytes at 362.5 GB/s. Predicted for 6 rows, two cores, 5120 x (1280 and 512) and
        1280 x 4096: 47.6 us, 1.20 times the bound of 39.8. With 1280 x 4096 of the indexer and of x the indexer's 32 columns,
        63.8 us, 1.17 times; with a compressor's 512 as well, 71.2, 1.15 times; with twice 512, 78.6, 1.14 times.
        VectorE: 8.1 us, most of it the QDQs', 1.9 of it for the window KV; GpSimd: 2.2 us, zeros.
    """
    rows, contraction = x.shape
    low, dim, cores = q_norm.shape[1], kv_norm.shape[1], nl.num_programs()
    check_low(rows, contraction, low)
    check_window_kv(rows, kv_norm, table)
    assert q_norm.shape == (1, low), f"q_norm {q_norm.shape}, expected {(1, low)}"
    weights: list = []
    for weight in (wq_b, of_qr, of_x, second_of_x, third_of_x):
        if weight is not None:
            weights.append(weight)
    behind = 1 if of_qr is None else 2
    given, expected = (len(columns), len(rounds)), (len(weights), len(weights) - behind)
    assert given == expected, f"columns and rounds: expected {expected} for these weights, found {given}"
    check(x, wq_a, low, quantize)
    check_weight(wkv, contraction, dim)
    narrow = x.dtype == nl.bfloat16 and wq_a.dtype == nl.bfloat16 and wkv.dtype == nl.bfloat16
    assert narrow, f"x {x.dtype}, wq_a {wq_a.dtype}, wkv {wkv.dtype}: bfloat16 only"
    kv = nl.ndarray((rows, dim), nl.bfloat16, buffer=nl.shared_hbm)
    outs: list = []
    for i in range(len(weights)):
        check_weight(weights[i], low if i < behind else contraction, columns[i])
        assert weights[i].dtype == nl.bfloat16, f"weight {weights[i].dtype}: bfloat16 only"
        rounded = i < behind or rounds[i - behind]
        outs.append(nl.ndarray((rows, columns[i]), nl.bfloat16 if rounded else nl.float32, buffer=nl.shared_hbm))

    plain_t_sb = turned_rows(x, nl.bfloat16, False) if len(weights) > behind else None
    slots = min(SLOTS, max(low, dim) // (PARTITIONS * cores))
    wide_sb = slot_tiles(turned_rows(x, nl.bfloat16, quantize), slots)
    same_sb = same_row(MOST_ROWS, slots)
    stores: list = []
    for i in range(behind, len(weights)):
        stores += project(outs[i], plain_t_sb, weights[i], contraction, last=False)
    low_rows = slot_norm(share_sums(wide_sb, slots, wq_a, low // cores), q_norm, same_sb, eps, 0)
    qr_t_sb = latent(low_rows, rows, low, quantize)
    kv_rows = slot_norm(share_sums(wide_sb, slots, wkv, dim // cores), kv_norm, same_sb, eps, 2)
    stores += window_kv(kv, kv_rows, table)
    for i in range(behind):
        stores += project(outs[i], qr_t_sb, weights[i], low, last=i + 1 == behind)
    store(stores)
    found: list = [kv]
    found += outs
    return tuple(found)


def latent(low_rows: list, rows: int, low: int, quantize: bool) -> nl.NkiTensor:
    """qr of all columns, turned, [128, L / 128, M] bf16 @ SBUF, of ``low_rows``, slot_norm of wq_a's sums; L is ``low``."""
    cores, core = nl.num_programs(), nl.program_id()
    each = low // cores // PARTITIONS
    qr_t_sb = nl.ndarray((PARTITIONS, low // PARTITIONS, rows), nl.bfloat16, buffer=nl.sbuf)
    own = qr_t_sb[:, core * each : (core + 1) * each]
    for first, slots in tiles(each, SLOTS):
        l_sb = low_rows[first // SLOTS]
        if quantize:
            groups = l_sb.reshape_dim(1, (PARTITIONS // GROUP, GROUP))
            qdq(groups, groups)
        turn_slots(own[:, first : first + slots], l_sb)
    if cores > 1:
        exchange(own, qr_t_sb[:, (1 - core) * each : (2 - core) * each], 1)
    return qr_t_sb
