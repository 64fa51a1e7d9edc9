# SPDX-License-Identifier: Apache-2.0
"""On the device: a part of an expert whose weights pass while other weights do: w1 and w3, SwiGLU, QDQ, w2, all in slots."""

import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP
from .exchange import exchange
from .experts_plan import shrinking
from .linear_stream import pieces
from .rounding import grid_floor, magnitude, round_to_grid
from .slots import MOST_ROWS, slot_products
from .split import BANK, PARTITIONS, tiles
from .swiglu import gated

TOGETHER = 12
"""Tiles of 128 columns of y that are turned back to rows together, while the next ones' products run."""


def hidden(wide_sb: nl.NkiTensor, w13: nl.NkiTensor, columns: int, limit: float, pipe: int) -> nl.NkiTensor:
    """w2's input qdq(swiglu(gate, up)) in slots of W = min(``columns``, 128) [slots 32, W] bf16; gate and up are rounded.

    wide_sb has this core's part of K in slots; w13 [2, 128, KT columns] bf16 @ HBM, of gate and of up. The cores exchange
    their sums, of the gate while up's weights stream, through ``pipe`` and the next one.
    """
    across, width = (columns + PARTITIONS - 1) // PARTITIONS * MOST_ROWS, min(columns, PARTITIONS)
    k_tiles = w13.shape[2] // columns
    gate_up_sb = nl.ndarray((across, 2, width), nl.bfloat16, buffer=nl.sbuf)
    for which in range(2):
        sums_psum = nl.ndarray((across, width), nl.float32, buffer=nl.psum)
        parts = pieces(k_tiles, 2 * columns, False) if which == 0 else shrinking(k_tiles, k_tiles, (k_tiles + 1) // 2)
        slot_products(sums_psum, wide_sb, w13[which], parts)
        add_up(gate_up_sb[:, which], sums_psum, pipe + which)
    h_sb = nl.ndarray((across, width), nl.bfloat16, buffer=nl.sbuf)
    gated(h_sb, gate_up_sb, None, limit, False)
    round_groups(h_sb.reshape_dim(1, (width // GROUP, GROUP)))
    return h_sb


def add_up(out_sb: nl.NkiTensor, sums_psum: nl.NkiTensor, pipe: int) -> None:
    """out_sb = sums_psum plus the other core's, the same bits on both, rounded to out_sb's dtype."""
    if nl.num_programs() == 1:
        nisa.tensor_copy(dst=out_sb, src=sums_psum, engine=nisa.engine.scalar)
        return
    mine_sb = nl.ndarray(sums_psum.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mine_sb, src=sums_psum, engine=nisa.engine.scalar)
    other_sb = nl.ndarray(sums_psum.shape, nl.float32, buffer=nl.sbuf)
    exchange(mine_sb, other_sb, pipe)
    nisa.tensor_tensor(dst=out_sb, data1=mine_sb, data2=other_sb, op=nl.add)


def round_groups(h_sb: nl.NkiTensor) -> None:
    """``activation_qdq.qdq`` of h_sb [P, groups, 32] bf16 in place, for values below 2^107: 8 VectorE instructions alone."""
    shape = h_sb.shape
    power_sb = nl.ndarray(shape, nl.bfloat16, buffer=nl.sbuf)
    magnitude(power_sb, h_sb)
    floor_sb = nl.ndarray(shape[:2], nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=floor_sb, op=nl.maximum, data=power_sb, axis=2)
    grid_floor(floor_sb, floor_sb)
    exponent_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    total_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    round_to_grid(h_sb, h_sb, floor_sb.expand_dim(2).broadcast(2, GROUP), power_sb, exponent_sb, total_sb)


def down(y: nl.NkiTensor, h_t_sb: nl.NkiTensor, stream: nl.NkiTensor, contraction: int) -> list:
    """y [M, N] fp32 @ HBM = h w2 for h_t_sb [W, KT, M] and stream [W, KT N] bf16 @ HBM: linear_layout.pack.

    The weights are stationary and 128 columns of y lie on the partitions: a product is short, so h may come late.
    Returns the stores, (destination, source).
    """
    _, k_tiles, rows = h_t_sb.shape
    blocks = (y.shape[1] + BANK - 1) // BANK
    stores: list = []
    before: list = []
    for first, end in ((0, (blocks - 1) * BANK), ((blocks - 1) * BANK, y.shape[1])):
        if end > first:
            weight_sb = nl.ndarray((stream.shape[0], k_tiles * (end - first)), nl.bfloat16, buffer=nl.sbuf)
            nisa.dma_copy(dst=weight_sb, src=stream[:, k_tiles * first : k_tiles * end])
            for t, n in tiles((end - first) // PARTITIONS, min(PARTITIONS // rows, TOGETHER)):
                sums_sb = down_tiles(weight_sb, h_t_sb, t, n, contraction)
                for target, sums in before:
                    stores.append((target, turned_back(sums)))
                part = slice(first + t * PARTITIONS, first + (t + n) * PARTITIONS)
                before = [(y[:, part].reshape_dim(1, (n, PARTITIONS)).permute((1, 0, 2)), sums_sb)]
    for target, sums in before:
        stores.append((target, turned_back(sums)))
    return stores


def down_tiles(weight_sb: nl.NkiTensor, h_t_sb: nl.NkiTensor, first: int, count: int, contraction: int) -> nl.NkiTensor:
    """[128, count, M] fp32 @ SBUF: columns 128 (first + j) + p of h w2, whose weights are blocks of 512 columns."""
    _, k_tiles, rows = h_t_sb.shape
    sums_psum = nl.ndarray((PARTITIONS, count, rows), nl.float32, buffer=nl.psum)
    for j in range(count):
        column = (first + j) * PARTITIONS
        block = column // BANK * BANK
        width = min(BANK, weight_sb.shape[1] // k_tiles - block)
        weight = weight_sb[:, k_tiles * block : k_tiles * (block + width)].reshape_dim(1, (k_tiles, width))
        for i in range(k_tiles):
            used = min(PARTITIONS, contraction - i * PARTITIONS)
            nisa.nc_matmul(
                dst=sums_psum[:, j], stationary=weight[0:used, i, column - block : column - block + PARTITIONS],
                moving=h_t_sb[0:used, i], accumulate=i > 0,
            )  # fmt: skip
    sums_sb = nl.ndarray(sums_psum.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=sums_sb, src=sums_psum, engine=nisa.engine.scalar)
    return sums_sb


def turned_back(sums_sb: nl.NkiTensor) -> nl.NkiTensor:
    """sums_sb [128, n, M] as rows [n M, 128] fp32 @ SBUF."""
    _, count, rows = sums_sb.shape
    turned_psum = nl.ndarray((count * rows, PARTITIONS), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned_psum, data=sums_sb)
    rows_sb = nl.ndarray(turned_psum.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows_sb, src=turned_psum, engine=nisa.engine.scalar)
    return rows_sb
