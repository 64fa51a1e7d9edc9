# SPDX-License-Identifier: Apache-2.0
"""How the experts kernel cuts an expert into tiles and weight pieces: plain integers, for the host's layout and the kernel.

A core has ``columns`` of the gate and as many of the up projection. Tiles of them are ``width`` wide, tiles of the hidden
dimension ``hidden_width``, at most 128, since they become partitions. Weights come in pieces, each contiguous per partition:
large ones first, for the DMA's sake, small ones last, because what follows the last byte is only the last piece's work.
"""

import dataclasses

PARTITIONS, GROUP = 128, 32
LEAST_TILES_UP, MOST_TILES_UP = 2, 4
"""Tiles of one piece of w1 and w3: with 128 rows their results fill two banks of PSUM."""
MOST_TILES_DOWN = 10
"""Hidden tiles that are summed at a time: with 128 rows they fill three banks of PSUM."""
LEAST_BYTES = 2048
"""Per partition of a piece of w2, where there are so many: below it a DMA is far from its peak rate."""
UP_BYTES, DOWN_BYTES = 96 * 1024, 48 * 1024
"""SBUF per partition for weights in flight."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiling of one core's share of an expert: ``up_*`` for w1 and w3, ``down_*`` for w2."""

    hidden: int
    hidden_width: int
    columns: int
    width: int
    cores: int
    up_pieces: list
    """Tiles per piece, of w1 and of w3."""
    up_parts: int
    """DMAs per piece, along the contraction: 2 where there is one piece only, so that loads and matmuls overlap."""
    down_pieces: list
    """Hidden tiles per piece."""
    down_others: int
    """How many of these pieces are the other core's half of the result."""

    @property
    def hidden_tiles(self) -> int:
        """Tiles of the hidden dimension."""
        return self.hidden // self.hidden_width

    @property
    def tiles(self) -> int:
        """Tiles of the columns."""
        return self.columns // self.width

    @property
    def scale_bytes(self) -> int:
        """Bytes per partition of an expert's scales, bf16, ahead of the first piece of w1 and w3."""
        return 2 * (2 * self.tiles + self.hidden_tiles)

    @property
    def up_sizes(self) -> list:
        """Bytes per partition of each DMA of w1 and w3."""
        sizes = []
        for piece in self.up_pieces:
            for _ in range(self.up_parts):
                sizes.append(self.hidden_tiles // self.up_parts * 2 * piece * self.width)
        sizes[0] += self.scale_bytes
        return sizes

    @property
    def down_sizes(self) -> list:
        """Bytes per partition of each DMA of w2."""
        sizes = []
        for piece in self.down_pieces:
            sizes.append(self.tiles * piece * self.hidden_width)
        return sizes


def widest(total: int, multiple: int) -> int:
    """The widest tile, at most 128, that divides ``total`` into a multiple of ``multiple`` tiles."""
    count = multiple
    while total % count != 0 or total // count > PARTITIONS:
        count += multiple
    return total // count


def shrinking(total: int, most: int, least: int = 1) -> list:
    """``total`` as pieces of half of what is left, ``least`` to ``most`` each (the only one may be less)."""
    pieces = []
    left = total
    while left > 0:
        piece = min(max((left + 1) // 2, least), most)
        piece = left if left - piece < least and left <= most else piece
        pieces.append(piece)
        left -= piece
    return pieces


def columns_per_core(inter: int, cores: int) -> int:
    """Columns of a core's share of ``inter``: whole groups of 32, the last core's filled up with zeros."""
    return (inter + GROUP * cores - 1) // (GROUP * cores) * GROUP


def plan(hidden: int, columns: int, cores: int) -> Plan:
    """The tiling for ``columns`` per core. hidden is a multiple of 32 * cores, columns of 32."""
    assert hidden % (GROUP * cores) == 0, f"hidden {hidden} is no multiple of {GROUP * cores}, on {cores} cores"
    assert columns % GROUP == 0, f"{columns} columns per core are no multiple of {GROUP}"
    width, hidden_width = widest(columns, 1), widest(hidden, cores)
    unit = 1
    while unit * width % GROUP != 0:
        unit += 1
    up_pieces = []
    most, least = max(MOST_TILES_UP // unit, 1), max(LEAST_TILES_UP // unit, 1)
    for count in shrinking(columns // width // unit, most, least):
        up_pieces.append(count * unit)
    hidden_tiles, tile_bytes = hidden // hidden_width, columns // width * hidden_width
    parts = 2 if len(up_pieces) == 1 and hidden_tiles % 2 == 0 else 1
    half = hidden_tiles // cores
    own = shrinking(half, MOST_TILES_DOWN, (LEAST_BYTES + tile_bytes - 1) // tile_bytes)
    others = []
    if cores > 1:
        others = [half] if half == 1 else [half - half // 2, half // 2]
    return Plan(hidden, hidden_width, columns, width, cores, up_pieces, parts, others + own, len(others))


def slots(sizes: list, budget: int) -> list:
    """Bytes of the buffers that pieces of ``sizes`` bytes go through in turn: all at once where they fit into ``budget``."""
    total, largest = 0, 0
    for size in sizes:
        total += size
        largest = max(largest, size)
    if total <= budget:
        return sizes
    assert 2 * largest <= budget, f"two weight pieces of {largest} bytes per partition exceed {budget}"
    return [largest] * (budget // largest)
