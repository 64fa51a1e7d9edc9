# SPDX-License-Identifier: Apache-2.0
"""On the device: few rows spread over all partitions, M of 32 in each of up to four slots; a slot has a part of the columns.

Rows lie as columns between zeros. A window of 32 per slot that begins at the right place is a stationary tile with the rows in
one slot and zeros in the others: products of all slots add up in one PSUM tile, and what follows works on few columns of many
partitions.
"""

import nki.isa as nisa
import nki.language as nl

from .split import BANK, PARTITIONS, tiles

SLOTS = BANK // PARTITIONS
MOST_ROWS = PARTITIONS // SLOTS
LEAST_COLUMNS = 64
"""Of a slot: fewer take the tensor engine as long."""


def slots_of(columns: int) -> tuple[int, int]:
    """Into how many slots ``columns`` are divided, and the columns of each but the last."""
    width = min(max((columns + SLOTS - 1) // SLOTS, LEAST_COLUMNS), columns)
    return (columns + width - 1) // width, width


def between_zeros(k_tiles: int, slots: int) -> nl.NkiTensor:
    """Zeros [128, (k_tiles slots + slots - 1) 32] bf16, for ``fill``. GpSimd writes them, two at a time."""
    wide_sb = nl.ndarray((PARTITIONS, (k_tiles * slots + slots - 1) * MOST_ROWS), nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=wide_sb.view(nl.float32), value=0.0, engine=nisa.engine.gpsimd)
    return wide_sb


def fill(wide_sb: nl.NkiTensor, x_t_sb: nl.NkiTensor, slots: int) -> None:
    """Puts x_t_sb [128, KT, M] between the zeros."""
    _, k_tiles, rows = x_t_sb.shape
    places = wide_sb[:, (slots - 1) * MOST_ROWS :].reshape_dim(1, (k_tiles, slots * MOST_ROWS))
    nisa.tensor_copy(dst=places[:, :, 0:rows], src=x_t_sb, engine=nisa.engine.scalar)


def slot_products(sums_psum: nl.NkiTensor, wide_sb: nl.NkiTensor, stream: nl.NkiTensor, pieces: list) -> None:
    """sums_psum [slots 32, width] fp32: in slot s the rows' products with columns s width and on of stream @ HBM.

    wide_sb is filled for as many slots; stream [128, KT columns] bf16 has the columns of one tile of K after the other's and
    ``pieces`` of them per DMA. The last slots may have fewer columns than ``width``, or none, and zeros behind them.
    """
    across, width = sums_psum.shape
    slots = across // MOST_ROWS
    k_tiles = wide_sb.shape[1] // across
    columns = stream.shape[1] // k_tiles
    k = 0
    for n in pieces:
        weight_sb = nl.ndarray((PARTITIONS, n, columns), nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight_sb, src=stream[:, k * columns : (k + n) * columns].reshape_dim(1, (n, columns)))
        for i in range(n):
            for first, used in tiles(columns, width):
                s = first // width
                window = ((k + i) * slots + slots - 1 - s) * MOST_ROWS
                nisa.nc_matmul(
                    dst=sums_psum[:, 0:used], stationary=wide_sb[:, window : window + across],
                    moving=weight_sb[:, i, first : first + used], accumulate=k + i + s > 0,
                )  # fmt: skip
        k += n


def turn_slots(own: nl.NkiTensor, l_sb: nl.NkiTensor) -> None:
    """own [W, slots, M] bf16 @ SBUF: l_sb [slots 32, W], or its first slots, as columns; column W s + p on partition p."""
    across, width = l_sb.shape
    _, slots, rows = own.shape
    turned_psum = nl.ndarray((width, across), nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(dst=turned_psum, data=l_sb)
    turned = turned_psum.reshape_dim(1, (across // MOST_ROWS, MOST_ROWS))
    nisa.tensor_copy(dst=own, src=turned[:, 0:slots, 0:rows], engine=nisa.engine.scalar)


def identity() -> nl.NkiTensor:
    """[128, 128] fp32 with ones on its diagonal, made by GpSimd: no DMA in front of the weights."""
    ones_sb = nl.ndarray((PARTITIONS, PARTITIONS), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones_sb, value=1.0, engine=nisa.engine.gpsimd)
    identity_sb = nl.ndarray((PARTITIONS, PARTITIONS), nl.float32, buffer=nl.sbuf)
    diagonal = [[-1, PARTITIONS]]
    nisa.affine_select(dst=identity_sb, pattern=diagonal, channel_multiplier=1, on_true_tile=ones_sb, on_false_value=0.0)
    return identity_sb


def gather_slots(sums_psum: nl.NkiTensor, slots_sb: nl.NkiTensor, identity_sb: nl.NkiTensor, accumulate: bool) -> None:
    """sums_psum [M, n] fp32 = the rows of slots_sb [slots 32, width] fp32, slot by slot, added to what is there on request.

    A product with an identity's columns picks a slot's rows, exactly.
    """
    rows, columns = sums_psum.shape
    across, width = slots_sb.shape
    for first, count in tiles(columns, width):
        at = first // width * MOST_ROWS
        nisa.nc_matmul(
            dst=sums_psum[:, first : first + count], stationary=identity_sb[0:across, at : at + rows],
            moving=slots_sb[:, 0:count], accumulate=accumulate,
        )  # fmt: skip
