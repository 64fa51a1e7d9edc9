# SPDX-License-Identifier: Apache-2.0
"""On the device: one expert's w1 and w3, and one expert's w2, piece by piece as their weights arrive."""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from .experts_hidden import quantise, swiglu
from .experts_tiles import Experts

ROW_TILES = 4
"""Transposed tiles of the result that fill a bank of PSUM."""


def up(e: Experts, expert: Any, side: int) -> None:
    """hidden[side] = w2's input of ``expert``, an integer or a tile [1, 1] int32; its last piece is not quantised yet."""
    core, shape, width = nl.program_id(), e.shape, e.shape.width
    scale_sb = e.scales[side]
    nisa.dma_copy(dst=scale_sb, src=e.scale[:, core].select(0, expert))
    nisa.tensor_copy(dst=e.weight, src=e.routing[0:width].select(1, expert), engine=nisa.engine.gpsimd)
    up_scale = scale_sb[0:width, 0 : 2 * shape.tiles].reshape_dim(1, (2, shape.tiles))
    contraction = shape.hidden_tiles // shape.up_parts
    piece, first, at = 0, 0, 0
    for j in range(len(shape.up_pieces)):
        g = shape.up_pieces[j]
        products = e.products[j % len(e.products)][:, :, 0:g, 0 : e.rows]
        for part in range(shape.up_parts):
            nbytes = shape.up_sizes[piece]
            weights_sb = e.up_slots[piece % len(e.up_slots)][:, 0:nbytes]
            nisa.dma_copy(dst=weights_sb, src=e.w13[:, core, :, at : at + nbytes].select(0, expert))
            weights = weights_sb.reshape_dim(1, (contraction, 2, g * width))
            for which in range(2):
                for t in range(g):
                    for k in range(contraction):
                        nisa.nc_matmul(
                            dst=products[:, which, t],
                            stationary=weights[:, k, which, t * width : (t + 1) * width],
                            moving=e.x_t[:, part * contraction + k],
                            accumulate=part + k > 0,
                        )
            piece, at = piece + 1, at + nbytes
        if j > 0:
            finish_piece(e, side, first - shape.up_pieces[j - 1], first)
        swiglu(
            e.hidden[side][:, first : first + g], products, up_scale[:, :, first : first + g], e.weight, e.limit, e.work
        )
        first += g


def finish_up(e: Experts, side: int) -> None:
    """Quantise the last piece of hidden[side]. Where this comes late, the tensor engine has other work before it."""
    finish_piece(e, side, e.shape.tiles - e.shape.up_pieces[-1], e.shape.tiles)


def finish_piece(e: Experts, side: int, first: int, end: int) -> None:
    """Quantise tiles ``first`` to ``end`` of hidden[side] where release numerics ask for it."""
    if e.quantize:
        quantise(e.hidden[side][:, first:end], e.work)


def down(e: Experts, expert: Any, side: int, last: bool) -> None:
    """total += hidden[side] w2; for the ``last`` expert the result is exchanged and stored too.

    On two cores the first half of the pieces is the other core's half of the result: it is sent while the second half's
    weights arrive.
    """
    shape, pieces = e.shape, e.shape.down_pieces
    ahead = min(len(e.down_slots), len(pieces))
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + piece)
    for j in range(ahead):
        load_down(e, expert, j, starts[j])
    for j in range(len(pieces)):
        first, end = starts[j], starts[j + 1]
        multiply_down(e, side, j, first, end)
        if j + ahead < len(pieces):
            load_down(e, expert, j + ahead, starts[j + ahead])
        if last:
            store(e, first, end)


def load_down(e: Experts, expert: Any, j: int, first: int) -> None:
    """Load piece j of w2."""
    nbytes, at = e.shape.down_sizes[j], first * e.shape.tiles * e.shape.hidden_width
    nisa.dma_copy(
        dst=e.down_slots[j % len(e.down_slots)][:, 0:nbytes],
        src=e.w2[:, nl.program_id(), :, at : at + nbytes].select(0, expert),
    )


def multiply_down(e: Experts, side: int, j: int, first: int, end: int) -> None:
    """total[first:end] += hidden[side] times piece j of w2."""
    shape, width, n = e.shape, e.shape.hidden_width, end - first
    weights = e.down_slots[j % len(e.down_slots)][:, 0 : shape.down_sizes[j]].reshape_dim(1, (shape.tiles, n * width))
    sums = e.sums[j % len(e.sums)][:, 0:n, 0 : e.rows]
    for t in range(n):
        for k in range(shape.tiles):
            nisa.nc_matmul(
                dst=sums[:, t],
                stationary=weights[:, k, t * width : (t + 1) * width],
                moving=e.hidden[side][:, k],
                accumulate=k > 0,
            )
    scale = e.scales[side][0:width, 2 * shape.tiles + first : 2 * shape.tiles + end].expand_dim(2).broadcast(2, e.rows)
    y, total = e.y[:, 0:n], e.total[:, first:end]
    nisa.tensor_tensor(dst=y, data1=sums, data2=scale, op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=y, op=nl.add)


def store(e: Experts, first: int, end: int) -> None:
    """Tiles ``first`` to ``end`` of the total to out's rows; on two cores the first half goes to the other core instead."""
    own = e.shape.hidden_tiles - e.shape.hidden_tiles // e.shape.cores
    if end <= own:
        if end == own:
            other = 1 - nl.program_id()
            nisa.sendrecv(src=e.total[:, 0:own], dst=e.received, send_to_rank=other, recv_from_rank=other, pipe_id=0)
        return
    total, width = e.total[:, first:end], e.shape.hidden_width
    if own > 0:
        nisa.tensor_tensor(dst=total, data1=total, data2=e.received[:, first - own : end - own], op=nl.add)
    rows_sb = nl.ndarray((e.rows, (end - first) * width), nl.float32, buffer=nl.sbuf)
    for t in range(0, end - first, ROW_TILES):
        n = min(ROW_TILES, end - first - t)
        rows_psum = nl.ndarray((e.rows, n * width), nl.float32, buffer=nl.psum)
        for i in range(n):
            nisa.nc_transpose(dst=rows_psum[:, i * width : (i + 1) * width], data=total[:, t + i])
        nisa.tensor_copy(dst=rows_sb[:, t * width : (t + n) * width], src=rows_psum)
    at = nl.program_id() * own * width + (first - own) * width
    nisa.dma_copy(dst=e.out[:, at : at + (end - first) * width], src=rows_sb)
