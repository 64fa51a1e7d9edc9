# SPDX-License-Identifier: Apache-2.0
"""On the device: a narrow linear between two wide ones, its result in slots (slots.py) of 128 columns each.

So what follows, norms and QDQ, works on 128 columns of 128 partitions, not on 512 of M.
"""

import nki.language as nl

from .slots import MOST_ROWS, between_zeros, fill, slot_products
from .split import BANK, PARTITIONS, tiles

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
    """x_t_sb [128, K / 128, M] bf16 between zeros, for ``slots`` slots."""
    wide_sb = between_zeros(x_t_sb.shape[1], slots)
    fill(wide_sb, x_t_sb, slots)
    return wide_sb


def share_sums(wide_sb: nl.NkiTensor, slots: int, weight: nl.NkiTensor, share: int) -> list:
    """This core's ``share`` columns of the product with weight [C, 128, K / 128 share] @ HBM: [slots 32, 128] fp32 @ PSUM each.

    The b-th has in slot s of wide_sb's ``slots``, column n, the product with column 512 b + 128 s + n.
    """
    k_tiles, found = wide_sb.shape[1] // (slots * MOST_ROWS), []
    for first, width in tiles(share, BANK):
        stream = weight[nl.program_id(), :, k_tiles * first : k_tiles * (first + width)]
        sums_psum = nl.ndarray((slots * MOST_ROWS, PARTITIONS), nl.float32, buffer=nl.psum)
        pieces: list = []
        for _, n in tiles(k_tiles, max(PIECE_BYTES // (2 * width), 1)):
            pieces.append(n)
        slot_products(sums_psum, wide_sb, stream, pieces)
        found.append(sums_psum)
    return found
