# SPDX-License-Identifier: Apache-2.0
"""On the device: one expert's w1 and w3, and one expert's w2, piece by piece as their weights arrive."""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from .exchange import exchange
from .experts_hidden import find_floors, round_hidden, swiglu
from .experts_plan import PARTITIONS
from .experts_tiles import Experts


def up(e: Experts, expert: Any, side: int) -> None:
    """hidden[side] = w2's input of ``expert``, an integer or a tile [1, 1] int32, but for what finish_floors and finish do.

    The QDQ's transposes come one and two pieces late, when what they need is there and the tensor engine need not wait.
    """
    shape = e.shape
    nisa.tensor_copy(dst=e.weight, src=e.routing[0 : shape.width].select(1, expert), engine=nisa.engine.gpsimd)
    scale = e.scales[side][0 : shape.width, 0 : 2 * shape.tiles].reshape_dim(1, (2, shape.tiles))
    first = 0
    for j in range(len(shape.up_pieces)):
        g = shape.up_pieces[j]
        products = e.products[j % len(e.products)][:, :, 0:g, 0 : e.rows]
        multiply_up(e, expert, side, products, j, first)
        if e.quantize and j > 1:
            round_hidden(piece_of(e, side, j - 2), e.work)
        if e.quantize and j > 0:
            find_floors(piece_of(e, side, j - 1), e.work)
        swiglu(piece_of(e, side, j), products, scale[:, :, first : first + g], e.weight, e.limit, e.work)
        first += g


def multiply_up(e: Experts, expert: Any, side: int, products: nl.NkiTensor, j: int, first: int) -> None:
    """products [W, 2, g, M] @ PSUM = piece j of w1 and w3, whose columns begin at tile ``first``, times x.

    The first piece brings scales[side] too.
    """
    shape, width, g = e.shape, e.shape.width, e.shape.up_pieces[j]
    contraction = shape.hidden_tiles // shape.up_parts
    for part in range(shape.up_parts):
        number = j * shape.up_parts + part
        nbytes, head = shape.up_sizes[number], 0 if number > 0 else shape.scale_bytes
        at = shape.scale_bytes - head + 2 * width * (shape.hidden_tiles * first + part * contraction * g)
        weights_sb = e.up_slots[number % len(e.up_slots)][:, 0:nbytes]
        nisa.dma_copy(dst=weights_sb, src=e.w13[:, nl.program_id(), :, at : at + nbytes].select(0, expert))
        if head > 0:
            nisa.tensor_copy(dst=e.scales[side], src=weights_sb[:, 0:head].view(nl.bfloat16), engine=nisa.engine.gpsimd)
        weights = weights_sb[0 : shape.hidden_width, head:].reshape_dim(1, (contraction, 2, g * width))
        for which in range(2):
            for t in range(g):
                for k in range(contraction):
                    nisa.nc_matmul(
                        dst=products[:, which, t],
                        stationary=weights[:, k, which, t * width : (t + 1) * width],
                        moving=e.x_t[:, part * contraction + k],
                        accumulate=part + k > 0,
                    )


def piece_of(e: Experts, side: int, j: int) -> nl.NkiTensor:
    """Piece j of hidden[side], [W, g, M]."""
    first = 0
    for i in range(j):
        first += e.shape.up_pieces[i]
    return e.hidden[side][:, first : first + e.shape.up_pieces[j]]


def finish_floors(e: Experts, side: int) -> None:
    """What ``up`` left: the last piece but one, and the last one's floors."""
    last = len(e.shape.up_pieces) - 1
    if e.quantize:
        if last > 0:
            round_hidden(piece_of(e, side, last - 1), e.work)
        find_floors(piece_of(e, side, last), e.work)


def finish(e: Experts, side: int) -> None:
    """And the last piece."""
    if e.quantize:
        round_hidden(piece_of(e, side, len(e.shape.up_pieces) - 1), e.work)


def down(e: Experts, expert: Any, side: int, unfinished: int | None) -> None:
    """total += hidden[side] w2 of ``expert``, and hidden[unfinished], of the next expert, is finished on the way.

    Where there is no next one the cores meet and the result is stored. On two cores the first pieces of w2 are the other
    core's half of the result: it is sent while the second half's weights arrive.
    """
    pieces = e.shape.down_pieces
    ahead = min(len(e.down_slots), len(pieces))
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + piece)
    for j in range(ahead):
        load_down(e, expert, j, starts[j])
    own = e.shape.down_others
    for j in range(len(pieces)):
        multiply_down(e, side, j, starts[j], starts[j + 1])
        if j + ahead < len(pieces):
            load_down(e, expert, j + ahead, starts[j + ahead])
        if unfinished is not None:
            if j == 0:
                finish_floors(e, unfinished)
        elif j + 1 == own:
            add_other_half(e)
        elif j > own:
            store(e, starts[j - 1], starts[j])
    if unfinished is not None:
        finish(e, unfinished)
    else:
        store(e, starts[-2], starts[-1])


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
    scale = e.scales[side][0:width, 2 * shape.tiles + first : 2 * shape.tiles + end]
    total = e.total[:, first:end]
    if e.scaled is not None:
        y = e.scaled[:, 0:n]
        nisa.tensor_tensor(dst=y, data1=sums, data2=scale.expand_dim(2).broadcast(2, e.rows), op=nl.multiply)
        nisa.tensor_tensor(dst=total, data1=total, data2=y, op=nl.add)
    else:
        for t in range(n):
            so_far, factor = total[:, t], scale[:, t : t + 1]
            nisa.scalar_tensor_tensor(
                dst=so_far, data=sums[:, t], op0=nl.multiply, operand0=factor, op1=nl.add, operand1=so_far
            )


def add_other_half(e: Experts) -> None:
    """Send the first half of the total, the other core's columns, and add what it sends to the second half."""
    half = e.total.shape[1] // 2
    exchange(e.total[:, 0:half], e.received, 0)
    nisa.tensor_tensor(dst=e.total[:, half:], data1=e.total[:, half:], data2=e.received, op=nl.add)


def store(e: Experts, first: int, end: int) -> None:
    """Tiles ``first`` to ``end`` of the total to out's rows; one transpose takes as many tiles as have 128 rows together."""
    width, half = e.shape.hidden_width, 0 if e.received is None else e.total.shape[1] // 2
    for t in range(first, end, PARTITIONS // e.rows):
        n = min(PARTITIONS // e.rows, end - t)
        rows_psum = nl.ndarray((n * e.rows, width), nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=rows_psum, data=e.total[:, t : t + n])
        rows_sb = nl.ndarray((n * e.rows, width), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rows_sb, src=rows_psum, engine=nisa.engine.scalar)
        at = (nl.program_id() * half + t - half) * width
        nisa.dma_copy(dst=e.out[:, at : at + n * width].reshape_dim(1, (n, width)).permute((1, 0, 2)), src=rows_sb)
