# SPDX-License-Identifier: Apache-2.0
"""Storage behind tensors: bytes, what was written, what a matmul wrote, who touched it, and the dependencies that follow."""

import dataclasses
import enum

import numpy as np

POISON = 0xFF
"""Fresh memory: NaN in every float format, -1 in signed integers."""


class MemoryRegion(enum.Enum):
    """Where a tensor lives. ``hbm`` is the documentation's alias of ``private_hbm``."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
ON_CHIP = (SBUF, PSUM)

Box = tuple[int, int, int, int, int]
"""First and last+1 row, first and last+1 byte of a row, bytes per row. On chip a row is a partition."""


class History:
    """Which instructions touched which part of a storage: an access depends on those it may not overtake."""

    def __init__(self) -> None:
        self.writes: list[tuple[Box, int]] = []
        self.reads: list[tuple[Box, int]] = []

    def read(self, box: Box, instruction: int) -> set[int]:
        """Record a read; the writes that it must follow."""
        self.reads.append((box, instruction))
        return {index for other, index in self.writes if _overlap(box, other)}

    def write(self, box: Box, instruction: int) -> set[int]:
        """Record a write; the reads and writes that it must follow. What it covers whole is forgotten."""
        before = {index for other, index in self.writes + self.reads if _overlap(box, other)}
        self.writes = [entry for entry in self.writes if not _covers(box, entry[0])]
        self.reads = [entry for entry in self.reads if not _covers(box, entry[0])]
        self.writes.append((box, instruction))
        return before - {instruction}


def _overlap(a: Box, b: Box) -> bool:
    if a[4] == b[4]:
        return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]
    (low_a, high_a), (low_b, high_b) = _extent(a), _extent(b)
    return low_a < high_b and low_b < high_a


def _covers(a: Box, b: Box) -> bool:
    if a[4] == b[4]:
        return a[0] <= b[0] and b[1] <= a[1] and a[2] <= b[2] and b[3] <= a[3]
    (low_a, high_a), (low_b, high_b) = _extent(a), _extent(b)
    return low_a <= low_b and high_b <= high_a


def _extent(box: Box) -> tuple[int, int]:
    return box[0] * box[4] + box[2], (box[1] - 1) * box[4] + box[3]


@dataclasses.dataclass(slots=True)
class TileUse:
    """How long an allocation lives: the first and the last instruction that touches it, -1 before any does."""

    region: MemoryRegion
    core: int | None
    partition_bytes: int
    first: int = -1
    last: int = -1


class Storage:
    """The memory of one allocation.

    ``raw`` its bytes; ``written`` a flag per byte, None where all are; ``matmul`` (PSUM) a flag per byte: a matmul wrote it;
    ``use`` its size and life; ``loop`` the loop body it belongs to; the marks are the cores' accesses since the last barrier.
    """

    __slots__ = (
        "history", "loop", "matmul", "name", "partitions", "raw", "read_by", "region", "use", "written", "written_by",
    )  # fmt: skip

    def __init__(self, region: MemoryRegion, partitions: int, nbytes: int, name: str, raw: np.ndarray | None = None) -> None:
        self.region, self.partitions, self.name = region, partitions, name
        self.use = TileUse(region, None, nbytes // max(partitions, 1))
        self.raw = np.full(nbytes, POISON, np.uint8) if raw is None else raw
        self.written = np.zeros(nbytes, bool) if raw is None else None
        self.matmul = np.zeros(nbytes, bool) if region is PSUM else None
        self.history = History()
        self.loop: object | None = None
        self.read_by: np.ndarray | list = []
        self.written_by: np.ndarray | None = None

    def forget(self) -> None:
        """Make the contents uninitialised again, as at the next iteration of a loop; the history stays."""
        self.raw[...] = POISON
        self.written = np.zeros(self.raw.size, bool)
        if self.matmul is not None:
            self.matmul[...] = False
