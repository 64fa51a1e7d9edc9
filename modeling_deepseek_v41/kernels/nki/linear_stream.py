# SPDX-License-Identifier: Apache-2.0
"""On the device: the rows of a linear as columns, and its weight streamed past them."""

import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .experts_plan import shrinking
from .fold import folded, folds
from .split import BANK, PARTITIONS, tiles

PIECE_BYTES, LEAST_BYTES = 24576, 2048
"""Per partition of a DMA of weights; of the last ones, so that little work is left when the last byte is there."""
ROW_TILES = 4
"""Tiles of 128 rows per pass over the weight: with them a column tile's sums fill half of PSUM."""
COLUMN_BYTES = 80 * 1024
"""SBUF per partition for a pass's input as columns."""
STORED_COLUMNS = 4096
"""Columns of the result that are stored at a time."""
CHUNK = 1024
"""Columns of a folded input that are loaded, rounded and turned at a time."""


def check(x: nl.NkiTensor, weight: nl.NkiTensor, columns: int, quantize: bool) -> None:
    """Refuses x [M, K] and a weight [C, min(K, 128), KT S] that do not fit each other or ``columns`` outputs."""
    contraction = x.shape[1]
    check_weight(weight, contraction, columns)
    assert x.dtype == nl.bfloat16 or weight.dtype == nl.float32, f"x {x.dtype} with weight {weight.dtype}: fp32 with fp32 only"
    assert not quantize or x.dtype == nl.bfloat16, f"quantize: x is {x.dtype}, expected bfloat16"
    assert not quantize or contraction % GROUP == 0, f"quantize: x {x.shape}, columns no multiple of {GROUP}"


def check_weight(weight: nl.NkiTensor, contraction: int, columns: int) -> None:
    """Refuses a weight that is not [C, min(K, 128), KT S] for K = ``contraction`` and ``columns`` outputs."""
    cores, k_tiles = nl.num_programs(), (contraction + PARTITIONS - 1) // PARTITIONS
    shape = (cores, min(contraction, PARTITIONS), k_tiles * ((columns + cores - 1) // cores))
    assert weight.shape == shape, f"weight: expected {shape} for {contraction} x {columns}, found {weight.shape}"


def rows_per_pass(contraction: int, size: int = 2) -> int:
    """How many rows meet a weight while it is read once: whole 128s, which as columns of ``size`` bytes COLUMN_BYTES hold."""
    k_tiles = (contraction + PARTITIONS - 1) // PARTITIONS
    return PARTITIONS * max(min(ROW_TILES, COLUMN_BYTES // (k_tiles * PARTITIONS * size)), 1)


def turned_rows(x: nl.NkiTensor, dtype: str, quantize: bool) -> nl.NkiTensor:
    """x [M, K] @ HBM, through the QDQ where ``quantize``, as [min(K, 128), KT, M] dtype @ SBUF."""
    rows, contraction = x.shape
    k_tiles = (contraction + PARTITIONS - 1) // PARTITIONS
    x_t_sb = nl.ndarray((min(contraction, PARTITIONS), k_tiles, rows), dtype, buffer=nl.sbuf)
    for at, members in tiles(rows, PARTITIONS):
        load_columns(x_t_sb[:, :, at : at + members], x[at : at + members], quantize)
    return x_t_sb


def project(
    out: nl.NkiTensor, x_t_sb: nl.NkiTensor, weight: nl.NkiTensor, contraction: int, scale: nl.NkiTensor | None = None,
    last: bool = True,
) -> list:  # fmt: skip
    """This core's columns of out [M, N] @ HBM from its stream of weight [C, min(K, 128), KT S] @ HBM; M at most 512.

    scale [1, N] fp32 @ HBM; ``last``: nothing is read behind it, so its last pieces are small. Returns the last stores, to be
    issued by ``store`` when the next linear's weights are asked for, so that they stand in the way of none.
    """
    rows, columns = out.shape
    cores = weight.shape[0]
    share, k_tiles = (columns + cores - 1) // cores, x_t_sb.shape[1]
    first = nl.program_id() * share
    mine = min(share, columns - first)
    scale_sb = None
    if scale is not None:
        scale_sb = nl.ndarray((min(rows, PARTITIONS), mine), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=scale_sb, src=scale[:, first : first + mine].broadcast(0, min(rows, PARTITIONS)))
    stream = weight[nl.program_id()]
    stores: list = []
    for left, wide in tiles(mine, STORED_COLUMNS):
        store(stores)
        out_sb = nl.ndarray((min(rows, PARTITIONS), -(-rows // PARTITIONS), wide), out.dtype, buffer=nl.sbuf)
        for at, valid in tiles(wide, BANK):
            at += left
            width = min(BANK, share - at)
            tile = stream[:, k_tiles * at : k_tiles * (at + width)]
            factor = None if scale_sb is None else scale_sb[:, at : at + valid]
            result = out_sb[:, :, at - left : at - left + valid]
            multiply(result, x_t_sb, tile, contraction, factor, last and at + valid == mine)
        stores = []
        for at, members in tiles(rows, PARTITIONS):
            target = out[at : at + members, first + left : first + left + wide]
            stores.append((target, out_sb[0:members, at // PARTITIONS]))
    return stores


def store(stores: list) -> None:
    """Copies (destination, source) one after the other."""
    for i in range(len(stores)):
        nisa.dma_copy(dst=stores[i][0], src=stores[i][1])


def load_columns(x_t_sb: nl.NkiTensor, x: nl.NkiTensor, quantize: bool) -> None:
    """x [M, K] @ HBM to [min(K, 128), KT, M]: value t * 128 + p of K on partition p. M is at most 128."""
    fold = folds(x.shape[0], x.shape[1], PARTITIONS)
    source = folded(x, fold)
    for first, count in tiles(source.shape[2], CHUNK):
        turn_chunk(x_t_sb, load_chunk(source[:, :, first : first + count], quantize), first, fold)


def load_chunk(source: nl.NkiTensor, quantize: bool) -> nl.NkiTensor:
    """[J, M, columns] @ HBM, of a folded input, as a tile [J M, columns], through the QDQ where ``quantize``."""
    fold, rows, count = source.shape
    x_sb = nl.ndarray((fold * rows, count), source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=source)
    if quantize:
        groups = x_sb.reshape_dim(1, (count // GROUP, GROUP))
        qdq(groups, groups)
    return x_sb


def turn_chunk(x_t_sb: nl.NkiTensor, x_sb: nl.NkiTensor, first: int, fold: int) -> None:
    """x_sb [J M, columns], whose first column is ``first`` of a part, into its place in x_t_sb [min(K, 128), KT, M]."""
    rows, count = x_sb.shape
    by_part = x_t_sb.reshape_dim(1, (fold, x_t_sb.shape[1] // fold))
    together = 1024 // rows if x_sb.dtype == nl.bfloat16 else 512 // rows
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
    last: bool,
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
    for n in pieces(k_tiles, tile_bytes, last):
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


def pieces(k_tiles: int, tile_bytes: int, last: bool) -> list:
    """Tiles per DMA: as many as fit, and shrinking where the stream ends, so that the tensor engine does with it."""
    most = max(PIECE_BYTES // tile_bytes, 1)
    if last:
        return shrinking(k_tiles, most, max(LEAST_BYTES // tile_bytes, 1))
    found = []
    for _, n in tiles(k_tiles, most):
        found.append(n)
    return found
