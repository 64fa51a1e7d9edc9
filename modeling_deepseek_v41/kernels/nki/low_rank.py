# SPDX-License-Identifier: Apache-2.0
"""On the device: a narrow linear between two wide ones, its result spread over all partitions.

Four tiles of 128 of its columns lie on the partitions, 32 apart: slot s has columns 128 s on, and M rows of 32 are used. Rows
meet the weight in stationary tiles that are zero for the other slots, so that all add up in one PSUM tile, and what follows
works on 128 columns of 128 partitions, not on 512 of M. All four are windows of one tile, which has the rows between zeros.
"""

import nki.isa as nisa
import nki.language as nl

from .experts_stream import SMALL_EXCHANGE
from .split import BANK, PARTITIONS, tiles

SLOTS = BANK // PARTITIONS
MOST_ROWS = PARTITIONS // SLOTS
PIECE_BYTES = 20480
"""Per partition of a DMA of a narrow linear's weights: whole ones to the end, for what waits for it has a stream of its own."""


def check_low(rows: int, contraction: int, low: int) -> None:
    """Refuses what does not fill whole tiles."""
    cores = nl.num_programs()
    assert 1 <= rows <= MOST_ROWS, f"{rows} rows: expected 1 to {MOST_ROWS}"
    assert contraction % PARTITIONS == 0 and low % (PARTITIONS * cores) == 0, (
        f"{contraction} x {low} on {cores} cores: expected multiples of {PARTITIONS} per core"
    )


def slot_tiles(x_t_sb: nl.NkiTensor, slots: int) -> nl.NkiTensor:
    """x_t_sb [128, K / 128, M] between zeros, [128, K / 128, (2 slots - 1) * 32] bf16: a window has it at 32 s, else 0.

    GpSimd, which has nothing else to do, clears it while the rows are on their way.
    """
    _, k_tiles, rows = x_t_sb.shape
    between_sb = nl.ndarray((PARTITIONS, k_tiles, (2 * slots - 1) * MOST_ROWS), nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=between_sb.view(nl.float32), value=0.0, engine=nisa.engine.gpsimd)
    at = (slots - 1) * MOST_ROWS
    nisa.tensor_copy(dst=between_sb[:, :, at : at + rows], src=x_t_sb, engine=nisa.engine.scalar)
    return between_sb


def slot_sums(between_sb: nl.NkiTensor, stream: nl.NkiTensor, width: int) -> nl.NkiTensor:
    """[slots * 32, 128] fp32 @ PSUM: at 32 s, n the product with column 128 s + n of stream [128, K / 128 width] @ HBM."""
    _, k_tiles, wide = between_sb.shape
    last = (wide - MOST_ROWS) // 2
    sums_psum = nl.ndarray((last + MOST_ROWS, PARTITIONS), nl.float32, buffer=nl.psum)
    for k, n in tiles(k_tiles, max(PIECE_BYTES // (2 * width), 1)):
        weight_sb = nl.ndarray((PARTITIONS, n, width), nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight_sb, src=stream[:, k * width : (k + n) * width].reshape_dim(1, (n, width)))
        for i in range(n):
            for s in range(width // PARTITIONS):
                at = last - s * MOST_ROWS
                nisa.nc_matmul(
                    dst=sums_psum,
                    stationary=between_sb[:, k + i, at : at + last + MOST_ROWS],
                    moving=weight_sb[:, i, s * PARTITIONS : (s + 1) * PARTITIONS],
                    accumulate=k + i + s > 0,
                )
    return sums_psum


def share_sums(between_sb: nl.NkiTensor, weight: nl.NkiTensor, share: int) -> list:
    """``slot_sums`` of this core's ``share`` columns of weight [C, 128, K / 128 share] @ HBM: one tile per 512 of them."""
    k_tiles, found = between_sb.shape[1], []
    for first, width in tiles(share, BANK):
        stream = weight[nl.program_id(), :, k_tiles * first : k_tiles * (first + width)]
        found.append(slot_sums(between_sb, stream, width))
    return found


def turn_slots(own: nl.NkiTensor, l_sb: nl.NkiTensor) -> None:
    """own [128, tiles, M] = l_sb [slots * 32, 128] as columns."""
    _, slots, rows = own.shape
    turned_psum = nl.ndarray((PARTITIONS, l_sb.shape[0]), nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(dst=turned_psum, data=l_sb)
    turned = turned_psum.reshape_dim(1, (l_sb.shape[0] // MOST_ROWS, MOST_ROWS))
    nisa.tensor_copy(dst=own, src=turned[:, 0:slots, 0:rows])


def exchange(mine: nl.NkiTensor, received: nl.NkiTensor, pipe: int) -> None:
    """Sends ``mine``, of up to 3 dimensions, to the other core and receives its ``mine``."""
    other, values = 1 - nl.program_id(), 1
    for size in mine.shape[1:]:
        values *= size
    engine = nisa.dma_engine.gpsimd_dma if values <= SMALL_EXCHANGE else nisa.dma_engine.dma
    nisa.sendrecv(src=mine, dst=received, send_to_rank=other, recv_from_rank=other, pipe_id=pipe, dma_engine=engine)
