# SPDX-License-Identifier: Apache-2.0
"""The attention's input projections in one launch: wq_a, q_norm, QDQ and wq_b, and wkv beside them."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .fold import row_sums, same_row
from .linear_stream import check, project, store, turned_rows
from .low_rank import MOST_ROWS, SLOTS, check_low, exchange, slot_sums, slot_tiles, turn_slots
from .rms_norm import rms_scale
from .split import BANK, PARTITIONS, tiles


@nki.jit
def query_projection(
    x: nl.NkiTensor, wq_a: nl.NkiTensor, q_norm: nl.NkiTensor, wq_b: nl.NkiTensor, wkv: nl.NkiTensor, low: int, columns: int,
    dim: int, eps: float, quantize: bool = True,
) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:  # fmt: skip
    """q = wq_b(qr), qr = qdq(rms_norm(wq_a(x))), kv = wkv(x), of x through the QDQ; each result rounded to bf16.

    For decode. The weights of wkv and wq_b stream while the cores exchange what the norm and wq_b need of the other half.

    Dimensions:
        M: rows, 1 to 32. K: columns of x, a multiple of 128. C: cores. L: q_lora_rank, a multiple of 128 C. N: the rank's
        query columns. D: columns of wkv. S: a weight's columns per core.

    Args:
        x [M, K] bf16 @ HBM. wq_a, wkv [C, 128, K / 128 S], wq_b [C, 128, L / 128 S] bf16 @ HBM: linear_layout.pack.
        q_norm [1, L] fp32 @ HBM. low: L. columns: N. dim: D. eps: of the norm.
        quantize: both QDQs.

    Returns:
        q [M, N], qr [M, L], which the indexer takes too, and kv [M, D], before its norm; bf16 @ shared HBM.

    Notes:
        Reference: rows.linear, linear.rms_norm, formats.qdq_fp8. A core has half of wq_a's columns, in slots (low_rank.py). The
        cores exchange their sums of squares, and then their halves of qr.

    Pseudocode:
        x = qdq(x);  l = round(x wq_a[own columns]);  kv = round(x wkv)
        s = rsqrt((sum(l^2) + the other core's) / L + eps);  qr = qdq(round(l s q_norm))
        q[:, own columns] = round([transpose(qr), the other core's]^T wq_b)

    Cost:
        Per core: K L / (C 128^2) matmuls of 128 columns, K / 128 ceil(D / 512 C) and L / 128 ceil(N / 512 C) of up to 512.
        Bound: the weights' bytes at 362.5 GB/s. Predicted for 6 rows, 5120 x (1280 and 512) and 1280 x 4096, two cores: 48.3
        us, 1.22 times the bound of 39.8; in three launches, wq_a with wkv, rms_norm, wq_b, 58 us.
    """
    rows, contraction = x.shape
    check_low(rows, contraction, low)
    assert q_norm.shape == (1, low), f"q_norm {q_norm.shape}, expected {(1, low)}"
    for weight in (wq_a, wq_b, wkv):
        assert x.dtype == nl.bfloat16 and weight.dtype == nl.bfloat16, f"x {x.dtype}, weight {weight.dtype}: bfloat16 only"
    check(x, wq_a, low, quantize)
    check(x, wkv, dim, quantize)
    q = nl.ndarray((rows, columns), nl.bfloat16, buffer=nl.shared_hbm)
    qr = nl.ndarray((rows, low), nl.bfloat16, buffer=nl.shared_hbm)
    kv = nl.ndarray((rows, dim), nl.bfloat16, buffer=nl.shared_hbm)
    cores, core = nl.num_programs(), nl.program_id()
    share, k_tiles = low // cores, contraction // PARTITIONS
    each, slots = share // PARTITIONS, min(SLOTS, share // PARTITIONS)
    x_t_sb = turned_rows(x, nl.bfloat16, quantize)
    stationary_sb = slot_tiles(x_t_sb, slots)
    blocks = tiles(share, BANK)
    low_tiles: list = []
    square_sb = nl.ndarray((slots * MOST_ROWS, PARTITIONS), nl.float32, buffer=nl.sbuf)
    part_sb = nl.ndarray((slots * MOST_ROWS, len(blocks)), nl.float32, buffer=nl.sbuf)
    for b in range(len(blocks)):
        first, width = blocks[b]
        sums_psum = slot_sums(stationary_sb, wq_a[core, :, k_tiles * first : k_tiles * (first + width)], width)
        l_sb = nl.ndarray(sums_psum.shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=l_sb, src=sums_psum)
        nisa.activation(
            dst=square_sb, op=nl.square, data=l_sb, reduce_op=nl.add, reduce_res=part_sb[:, b : b + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        low_tiles.append(l_sb)
    scale_sb = norm_scale(part_sb, slots, low, eps)
    stores: list = []
    qr_t_sb = nl.ndarray((PARTITIONS, low // PARTITIONS, rows), nl.bfloat16, buffer=nl.sbuf)
    own = qr_t_sb[:, core * each : (core + 1) * each]
    for b in range(len(blocks)):
        first, width = blocks[b]
        used = width // PARTITIONS
        l_sb = low_tiles[b][0 : used * MOST_ROWS]
        weight_sb = nl.ndarray(l_sb.shape, nl.float32, buffer=nl.sbuf)
        at = core * share + first
        by_slot = q_norm[0, at : at + width].reshape((used, PARTITIONS))
        nisa.dma_copy(dst=weight_sb, src=by_slot.expand_dim(1).broadcast(1, MOST_ROWS))
        nisa.scalar_tensor_tensor(
            dst=l_sb, data=l_sb, op0=nl.multiply, operand0=scale_sb[0 : used * MOST_ROWS], op1=nl.multiply, operand1=weight_sb
        )
        if quantize:
            groups = l_sb.reshape_dim(1, (PARTITIONS // GROUP, GROUP))
            qdq(groups, groups)
        turn_slots(own[:, first // PARTITIONS : first // PARTITIONS + used], low_tiles[b])
        for s in range(used):
            target = qr[:, at + s * PARTITIONS : at + (s + 1) * PARTITIONS]
            stores.append((target, l_sb[s * MOST_ROWS : s * MOST_ROWS + rows]))
    if cores > 1:
        exchange(own, qr_t_sb[:, (1 - core) * each : (2 - core) * each], 1)
    stores += project(kv, x_t_sb, wkv, contraction, last=False)
    store(stores + project(q, qr_t_sb, wq_b, low))
    return q, qr, kv


def norm_scale(part_sb: nl.NkiTensor, slots: int, low: int, eps: float) -> nl.NkiTensor:
    """rsqrt(mean + eps) [slots * 32, 1] of sums of squares [slots * 32, n] of this core's columns and of the other's."""
    sums_psum = row_sums(part_sb, same_row(MOST_ROWS, slots))
    both_sb = nl.ndarray((part_sb.shape[0], 2), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=both_sb[:, 0:1], op=nl.add, data=sums_psum, axis=1)
    if nl.num_programs() == 1:
        return rms_scale(both_sb[:, 0:1], low, eps)
    exchange(both_sb[:, 0:1], both_sb[:, 1:2], 0)
    total_sb = nl.ndarray((part_sb.shape[0], 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total_sb, op=nl.add, data=both_sb, axis=1)
    return rms_scale(total_sb, low, eps)
