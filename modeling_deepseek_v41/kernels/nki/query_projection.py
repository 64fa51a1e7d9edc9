# SPDX-License-Identifier: Apache-2.0
"""The attention's input projections in one launch: wq_a, q_norm, QDQ and wq_b, wkv, and what compressor and indexer take."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .fold import row_sums, same_row
from .linear_stream import check, check_weight, project, store, turned_rows
from .low_rank import MOST_ROWS, SLOTS, check_low, exchange, slot_sums, slot_tiles, turn_slots
from .rms_norm import rms_scale
from .split import BANK, PARTITIONS, tiles


@nki.jit
def query_projection(
    x: nl.NkiTensor, wq_a: nl.NkiTensor, q_norm: nl.NkiTensor, wkv: nl.NkiTensor, wq_b: nl.NkiTensor,
    of_qr: nl.NkiTensor | None = None, of_x: nl.NkiTensor | None = None, second_of_x: nl.NkiTensor | None = None,
    third_of_x: nl.NkiTensor | None = None, columns: tuple = (), rounds: tuple = (), eps: float = 0.0, quantize: bool = True,
) -> tuple:  # fmt: skip
    """kv = wkv(x) and q = wq_b(qr), x through the QDQ, qr = qdq(rms_norm(wq_a(x))); further weights of qr, and of x as it is.

    For decode. All that a layer's attention, compressor and indexer read of x is one stream of weights. What takes x as it is
    comes first, it hides the QDQ; wkv hides the exchange of what the norm and wq_b need of the other core's half.

    Dimensions:
        M: rows, 1 to 32. K: columns of x, a multiple of 128. C: cores. L: q_lora_rank, a multiple of 128 C. N: a weight's
        output columns. S: its columns per core.

    Args:
        x [M, K] bf16 @ HBM. q_norm [1, L] fp32 @ HBM.
        wq_a, wkv, of_x, second_of_x, third_of_x [C, 128, K / 128 S], wq_b, of_qr [C, 128, L / 128 S] bf16 @ HBM:
        linear_layout.pack. A layer without an indexer has the first five operands; one with it goes on, up to third_of_x.
        columns: N of wkv, wq_b and each weight that follows. rounds: of each of_x, whether the result is rounded to bf16.
        eps: of the norm. quantize: both QDQs.

    Returns:
        A tuple of kv [M, N], before its norm, q [M, N], and [M, N] of each weight that follows; bf16 or, where of_x does not
        round, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear, linear.rms_norm, formats.qdq_fp8. A core has half of wq_a's columns, in slots (low_rank.py). The
        cores exchange their sums of squares, and then their halves of qr.

    Pseudocode:
        for each of_x: out = round(x of_x);  x = qdq(x);  l = round(x wq_a[own columns]);  kv = round(x wkv)
        s = rsqrt((sum(l^2) + the other core's) / L + eps);  qr = qdq(round(l s q_norm))
        q, of_qr: out[:, own columns] = round([transpose(qr), the other core's]^T weight)

    Cost:
        Per core: K L / (C 128^2) matmuls of 128 columns, K / 128 or L / 128 times ceil(N / 512 C) of up to 512 for each weight
        that follows. Bound: the weights' bytes at 362.5 GB/s. Predicted for 6 rows, two cores, 5120 x (1280 and 512) and
        1280 x 4096: 47.4 us, 1.20 times the bound of 39.8. With 1280 x 4096 of the indexer and of x the indexer's 32 columns,
        63.6 us, 1.17 times; with a compressor's 512 as well, 71.0, 1.15 times; with twice 512, 78.4, 1.14 times.
        VectorE: 6.3 us, most of it the QDQs'; GpSimd: 3.8 us, zeros.
    """
    rows, contraction = x.shape
    low = q_norm.shape[1]
    check_low(rows, contraction, low)
    assert q_norm.shape == (1, low), f"q_norm {q_norm.shape}, expected {(1, low)}"
    weights: list = []
    for weight in (wkv, wq_b, of_qr, of_x, second_of_x, third_of_x):
        if weight is not None:
            weights.append(weight)
    behind = 2 if of_qr is None else 3
    found, expected = (len(columns), len(rounds)), (len(weights), len(weights) - behind)
    assert found == expected, f"columns and rounds: expected {expected} for these weights, found {found}"
    check(x, wq_a, low, quantize)
    outs: list = []
    for i in range(len(weights)):
        check_weight(weights[i], low if 0 < i < behind else contraction, columns[i])
        same = weights[i].dtype == nl.bfloat16 and wq_a.dtype == nl.bfloat16 and x.dtype == nl.bfloat16
        assert same, f"x {x.dtype}, wq_a {wq_a.dtype}, weight {weights[i].dtype}: bfloat16 only"
        rounded = i < behind or rounds[i - behind]
        outs.append(nl.ndarray((rows, columns[i]), nl.bfloat16 if rounded else nl.float32, buffer=nl.shared_hbm))

    plain_t_sb = turned_rows(x, nl.bfloat16, False) if len(weights) > behind else None
    x_t_sb = turned_rows(x, nl.bfloat16, quantize)
    stores: list = []
    for i in range(behind, len(weights)):
        stores += project(outs[i], plain_t_sb, weights[i], contraction, last=False)
    qr_t_sb = latent(x_t_sb, wq_a, q_norm, eps, quantize)
    stores += project(outs[0], x_t_sb, wkv, contraction, last=False)
    for i in range(1, behind):
        stores += project(outs[i], qr_t_sb, weights[i], low, last=i + 1 == behind)
    store(stores)
    return tuple(outs)


def latent(x_t_sb: nl.NkiTensor, wq_a: nl.NkiTensor, q_norm: nl.NkiTensor, eps: float, quantize: bool) -> nl.NkiTensor:
    """qr of all columns, turned: [128, L / 128, M] bf16 @ SBUF; x_t_sb [128, K / 128, M]."""
    _, k_tiles, rows = x_t_sb.shape
    cores, core, low = nl.num_programs(), nl.program_id(), q_norm.shape[1]
    share = low // cores
    each, slots = share // PARTITIONS, min(SLOTS, share // PARTITIONS)
    between_sb = slot_tiles(x_t_sb, slots)
    blocks = tiles(share, BANK)
    low_tiles: list = []
    square_sb = nl.ndarray((slots * MOST_ROWS, PARTITIONS), nl.float32, buffer=nl.sbuf)
    part_sb = nl.ndarray((slots * MOST_ROWS, len(blocks)), nl.float32, buffer=nl.sbuf)
    for b in range(len(blocks)):
        first, width = blocks[b]
        sums_psum = slot_sums(between_sb, wq_a[core, :, k_tiles * first : k_tiles * (first + width)], width)
        l_sb = nl.ndarray(sums_psum.shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=l_sb, src=sums_psum, engine=nisa.engine.scalar)
        nisa.activation(
            dst=square_sb, op=nl.square, data=l_sb, reduce_op=nl.add, reduce_res=part_sb[:, b : b + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        low_tiles.append(l_sb)
    scale_sb = norm_scale(part_sb, slots, low, eps)
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
    if cores > 1:
        exchange(own, qr_t_sb[:, (1 - core) * each : (2 - core) * each], 1)
    return qr_t_sb


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
