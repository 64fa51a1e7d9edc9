# SPDX-License-Identifier: Apache-2.0
"""A linear whose time is that of reading its weight: bf16, fp32, or fp8_exact codes with a scale per output column."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .experts_plan import shrinking
from .fold import folded, folds
from .split import BANK, PARTITIONS, tiles

PIECE_BYTES, LEAST_BYTES = 16384, 2048
"""Per partition of a DMA of weights; of the last ones, so that little work is left when the last byte is there."""
ROW_TILES = 4
"""Tiles of 128 rows per pass over the weight: with them a column tile's sums fill half of PSUM."""
COLUMN_BYTES = 80 * 1024
"""SBUF per partition for a pass's input as columns."""
STORED_COLUMNS = 4096
"""Columns of the result that are stored at a time."""
CHUNK = 1024
"""Columns of a folded input that are loaded, rounded and turned at a time."""


@nki.jit
def linear(
    x: nl.NkiTensor, weight: nl.NkiTensor, columns: int, scale: nl.NkiTensor | None = None,
    quantize: bool = False, rounds: bool = True,
) -> nl.NkiTensor:  # fmt: skip
    """x W^T accumulated in fp32, x through the activation QDQ where ``quantize``.

    Made for decode, where reading the weight is all of the time: 1 to 128 rows. More rows run in passes of up to 512, each of
    which reads the weight once. Linears that share an input run as one, their weights stacked.

    Dimensions:
        M: rows. K: contraction; KT = ceil(K / 128). N: output columns. C: cores; each has S = ceil(N / C) columns.

    Args:
        x [M, K] bf16 or fp32 @ HBM; fp32 only with an fp32 weight.
        weight [C, min(K, 128), KT S] bf16, fp32 or float8_e4m3 @ HBM: linear_layout.pack.
        columns: N.
        scale [1, N] fp32 @ HBM: of the results, for fp8_exact codes. Every other weight has none.
        quantize: the QDQ of x, for weights that are stored in fp8; x is bf16, K a multiple of 32.
        rounds: the result is rounded to bf16.

    Returns:
        [M, N] bf16 or, without ``rounds``, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear, after formats.qdq_fp8 where ``quantize``. bf16 and fp8 products are exact.
        x is stationary and the weight moves: results lie as rows, and 128 rows take 1.2 times as long as one. A tile of
        128 x 128 weights takes the tensor engine 53 ns, the DMAs 90 ns in bf16; in fp8 45 ns, so that it is bound by the
        tensor engine, 1.2 times the memory's bound; in fp32 213 ns and 181 ns.
        The QDQ happens where x is folded over all partitions; with 128 rows ``activation_qdq`` beforehand takes half as long,
        since the cores share it.

    Pseudocode:
        x_t = transpose(qdq(x))
        for n in tiles of 512 of this core's columns:
            for piece of weight[n]: for k in piece: sums += x_t[k]^T weight[k, n]
            out[:, n] = round(sums * scale[n])

    Cost:
        Per core: KT ceil(S / 512) matmuls per 128 rows, a DMA per 16 KiB of weights per partition, K / (128 J) transposes of
        x in J parts. Bound: K S values at 362.5 GB/s. On top of it come 4 us, the latencies of the first load and of the
        store. Predicted, 6 rows, two cores: 5120 x 1792 (wq_a and wkv, QDQ) 32.3 us, bound 25.3; 1280 x 4096 (wq_b, QDQ)
        21.2, bound 14.5; 4096 x 1024 (wo_a, QDQ) 18.3, bound 11.6; 1024 x 5120 (wo_b, QDQ) 21.3, bound 14.5; 5120 x 2020
        (head) 35.9, bound 28.5; 5120 x 384 (router) 11.6, bound 5.4; 20480 x 24 in fp32 (fn)
        10.8, bound 2.7; 5120 x 576 in fp8 with QDQ 13.6, bound 4.1: the QDQ takes 3.3 us before the first matmul.
    """
    rows, contraction = x.shape
    cores = nl.num_programs()
    share = (columns + cores - 1) // cores
    k_tiles, parts = (contraction + PARTITIONS - 1) // PARTITIONS, min(contraction, PARTITIONS)
    shape = (cores, parts, k_tiles * share)
    assert weight.shape == shape, f"weight: expected {shape} for {contraction} x {columns}, found {weight.shape}"
    assert x.dtype == nl.bfloat16 or weight.dtype == nl.float32, f"x {x.dtype} with weight {weight.dtype}: fp32 with fp32 only"
    assert not quantize or x.dtype == nl.bfloat16, f"quantize: x is {x.dtype}, expected bfloat16"
    assert not quantize or contraction % GROUP == 0, f"quantize: x {x.shape}, columns no multiple of {GROUP}"
    assert scale is None or scale.shape == (1, columns), f"scale: expected (1, {columns}), found {scale.shape}"
    out = nl.ndarray((rows, columns), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    first = nl.program_id() * share
    mine = min(share, columns - first)
    if mine <= 0:
        return out
    dtype = nl.float32 if weight.dtype == nl.float32 else nl.bfloat16
    size = 4 if dtype == nl.float32 else 2
    block = PARTITIONS * max(min(ROW_TILES, COLUMN_BYTES // (k_tiles * PARTITIONS * size)), 1)
    for start, count in tiles(rows, block):
        x_t_sb = nl.ndarray((parts, k_tiles, count), dtype, buffer=nl.sbuf)
        for at, members in tiles(count, PARTITIONS):
            load_columns(x_t_sb[:, :, at : at + members], x[start + at : start + at + members], quantize)
        scale_sb = None
        if scale is not None:
            scale_sb = nl.ndarray((min(count, PARTITIONS), mine), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=scale_sb, src=scale[:, first : first + mine].broadcast(0, min(count, PARTITIONS)))
        stream = weight[nl.program_id()]
        for left, wide in tiles(mine, STORED_COLUMNS):
            out_sb = nl.ndarray((min(count, PARTITIONS), -(-count // PARTITIONS), wide), out.dtype, buffer=nl.sbuf)
            for at, valid in tiles(wide, BANK):
                at += left
                width = min(BANK, share - at)
                tile = stream[:, k_tiles * at : k_tiles * (at + width)]
                factor = None if scale_sb is None else scale_sb[:, at : at + valid]
                multiply(
                    out_sb[:, :, at - left : at - left + valid], x_t_sb, tile, contraction, factor, at == 0, at + valid == mine
                )
            for at, members in tiles(count, PARTITIONS):
                target = out[start + at : start + at + members, first + left : first + left + wide]
                nisa.dma_copy(dst=target, src=out_sb[0:members, at // PARTITIONS])
    return out


def load_columns(x_t_sb: nl.NkiTensor, x: nl.NkiTensor, quantize: bool) -> None:
    """x [M, K] @ HBM to [min(K, 128), KT, M]: value t * 128 + p of K on partition p. M is at most 128."""
    rows, contraction = x.shape
    fold = folds(rows, contraction, PARTITIONS)
    piece = contraction // fold
    by_part = x_t_sb.reshape_dim(1, (fold, x_t_sb.shape[1] // fold))
    together = 1024 // (fold * rows) if x.dtype == nl.bfloat16 else 512 // (fold * rows)
    source = folded(x, fold)
    for first, count in tiles(piece, CHUNK):
        x_sb = nl.ndarray((fold * rows, count), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_sb, src=source[:, :, first : first + count])
        if quantize:
            groups = x_sb.reshape_dim(1, (count // GROUP, GROUP))
            qdq(groups, groups)
        whole = count // PARTITIONS
        for t, n in tiles(whole, together):
            turn(by_part, x_sb, first, t, n, PARTITIONS, fold)
        if whole * PARTITIONS < count:
            turn(by_part, x_sb, first, whole, 1, count - whole * PARTITIONS, fold)


def turn(by_part: nl.NkiTensor, x_sb: nl.NkiTensor, first: int, t: int, n: int, width: int, fold: int) -> None:
    """Tiles t to t + n, ``width`` wide, of x_sb, whose first column is ``first`` of a part, into by_part [P, J, KT / J, M]."""
    rows = x_sb.shape[0]
    turned_psum = nl.ndarray((width, n, rows), x_sb.dtype, buffer=nl.psum)
    for i in range(n):
        at = (t + i) * PARTITIONS
        nisa.nc_transpose(dst=turned_psum[:, i], data=x_sb[:, at : at + width])
    place = first // PARTITIONS + t
    turned = turned_psum.reshape_dim(2, (fold, rows // fold)).permute((0, 2, 1, 3))
    nisa.tensor_copy(dst=by_part[0:width, :, place : place + n], src=turned)


def multiply(
    out_sb: nl.NkiTensor, x_t_sb: nl.NkiTensor, stream: nl.NkiTensor, contraction: int, scale: nl.NkiTensor | None,
    first: bool, last: bool,
) -> None:  # fmt: skip
    """out_sb [128, M / 128, columns], one column tile, whose weights are stream [P, KT width] @ HBM."""
    valid = out_sb.shape[2]
    parts, k_tiles, count = x_t_sb.shape
    width = stream.shape[1] // k_tiles
    tile_bytes = width * (4 if stream.dtype == nl.float32 else 2 if stream.dtype == nl.bfloat16 else 1)
    sums = []
    for _, members in tiles(count, PARTITIONS):
        sums.append(nl.ndarray((members, valid), nl.float32, buffer=nl.psum))
    k = 0
    for n in pieces(k_tiles, tile_bytes, first, last):
        weight_sb = nl.ndarray((parts, n, width), stream.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight_sb, src=stream[:, k * width : (k + n) * width].reshape_dim(1, (n, width)))
        for i in range(n):
            used = min(parts, contraction - (k + i) * PARTITIONS)
            for r in range(len(sums)):
                members = sums[r].shape[0]
                nisa.nc_matmul(
                    dst=sums[r],
                    stationary=x_t_sb[0:used, k + i, r * PARTITIONS : r * PARTITIONS + members],
                    moving=weight_sb[0:used, i, 0:valid],
                    accumulate=k + i > 0,
                )
        k += n
    for r in range(len(sums)):
        members = sums[r].shape[0]
        result = out_sb[0:members, r]
        if scale is None:
            nisa.tensor_copy(dst=result, src=sums[r], engine=nisa.engine.scalar if r % 2 == 0 else nisa.engine.vector)
        else:
            nisa.tensor_tensor(dst=result, data1=sums[r], data2=scale[0:members], op=nl.multiply)


def pieces(k_tiles: int, tile_bytes: int, first: bool, last: bool) -> list:
    """Tiles per DMA: growing where the stream begins, so that the tensor engine does, and shrinking where it ends."""
    most = max(PIECE_BYTES // tile_bytes, 1)
    least = max(LEAST_BYTES // tile_bytes, 1)
    end = k_tiles if not first else k_tiles // 2 if last else 0
    sizes = shrinking(k_tiles - end, most, least)
    growing = []
    for i in range(len(sizes)):
        growing.append(sizes[len(sizes) - 1 - i])
    if last:
        return growing + shrinking(end, most, least)
    for _, n in tiles(end, most):
        growing.append(n)
    return growing
