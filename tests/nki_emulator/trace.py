# SPDX-License-Identifier: Apache-2.0
"""The instructions that a kernel issued: counts, bytes, busy time per engine, peak memory, and a critical path."""

import bisect
import collections
import dataclasses
import heapq

from . import costs
from .memory import PSUM, SBUF, TileUse
from .rules import RuleError

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")


@dataclasses.dataclass(slots=True)
class Instruction:
    """One issued instruction. ``us`` is how long its engine is busy, ``latency_us`` what a dependent waits beyond that."""

    index: int
    core: int
    engine: str
    name: str
    line: str
    cycles: float
    us: float | None
    latency_us: float
    nbytes: int
    depends: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.us is None:
            clock = costs.GHZ[self.engine] * 1e3
            self.us = max(self.cycles, costs.ISSUE_CYCLES) / clock
            self.latency_us = (self.cycles + costs.DEPENDENT_CYCLES) / clock - self.us


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A list schedule: engines issue in program order, memory is finite. ``end`` and ``start`` in us per instruction.

    ``path`` is the chain of instructions that determines the makespan: each waited for the one before it.
    """

    makespan: float
    start: list[float]
    end: list[float]
    path: list[int]


class Trace:
    """What a launch did, in program order (core by core between barriers)."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.tiles: list[TileUse] = []

    def add(self, instruction: Instruction) -> None:
        """Append an instruction."""
        self.instructions.append(instruction)

    def last_line(self) -> str:
        """The kernel line of the last instruction."""
        return self.instructions[-1].line if self.instructions else "kernel"

    def count(self, name: str, core: int | None = None) -> int:
        """How many instructions called ``name`` were issued, on one core or on all."""
        return sum(one.name == name and core in (None, one.core) for one in self.instructions)

    def counts(self, core: int | None = None) -> dict[str, int]:
        """Instructions per name, sorted by name."""
        found = collections.Counter(one.name for one in self.instructions if core in (None, one.core))
        return dict(sorted(found.items()))

    def dma_bytes(self, core: int | None = None) -> int:
        """Bytes that DMA moved."""
        return sum(one.nbytes for one in self.instructions if core in (None, one.core))

    def busy(self, core: int | None = None) -> dict[str, float]:
        """us that each engine is busy; without ``core`` the larger of both cores."""
        per_core: dict[int, collections.Counter] = {}
        for one in self.instructions:
            per_core.setdefault(one.core, collections.Counter())[one.engine] += one.us
        chosen = [times for number, times in per_core.items() if core in (None, number)]
        return {engine: max((times[engine] for times in chosen), default=0.0) for engine in ENGINES}

    def lines(self, core: int = 0) -> list[tuple[str, str, int, float]]:
        """(kernel line, engine, instructions, busy us), the busiest first: where the time goes."""
        found: dict[tuple[str, str], list[float]] = {}
        for one in self.instructions:
            if one.core == core:
                entry = found.setdefault((one.line, one.engine), [0, 0.0])
                entry[0] += 1
                entry[1] += one.us
        return sorted(((line, engine, int(n), us) for (line, engine), (n, us) in found.items()), key=lambda row: -row[3])

    def peak(self) -> dict[str, int]:
        """The most live bytes per partition on any core, tiles living from first to last use in program order.

        PSUM counts whole banks. Raises RuleError where it exceeds what a core has.
        """
        peaks = {"sbuf": 0, "psum": 0}
        for region, limit in ((SBUF, costs.SBUF_USABLE_BYTES), (PSUM, costs.PSUM_BANKS * costs.PSUM_BANK_BYTES)):
            for core in {one.core for one in self.instructions}:
                events = []
                for tile in self.tiles:
                    if tile.region is region and tile.core == core and tile.first >= 0:
                        events += [(tile.first, 0, footprint(tile)), (tile.last, 1, -footprint(tile))]
                live = 0
                for index, _, change in sorted(events):
                    live += change
                    peaks[region.value] = max(peaks[region.value], live)
                    if live > limit:
                        one = self.instructions[index]
                        raise RuleError(f"{region.value}-capacity", one.line, one.name, region.value,
                                        f"{live} bytes per partition are live, {limit} are usable")  # fmt: skip
        return peaks

    def schedule(self) -> Schedule:
        """List scheduling in program order.

        An engine issues in order; DMAs share the bandwidth and fill gaps, since there are many queues. An instruction waits for
        its operands, and the first one of a tile for room. Matmuls do not wait for each other: PSUM accumulates as they stream.
        """
        count = len(self.instructions)
        start, end, why = [0.0] * count, [0.0] * count, [-1] * count
        engine_last: dict[tuple[int, str], int] = {}
        bandwidth: dict[int, _Gaps] = {}
        pools: dict[tuple, _Pool] = {}
        first_use, last_use = _uses(self.tiles)
        for one in self.instructions:
            at, reason = 0.0, -1
            for other in one.depends:
                streams = (
                    one.engine == self.instructions[other].engine == "tensor" and one.core == self.instructions[other].core
                )
                if end[other] > at and not streams:
                    at, reason = end[other], other
            previous = engine_last.get((one.core, one.engine), -1)
            if one.engine != "dma" and previous >= 0 and (free := start[previous] + self.instructions[previous].us) > at:
                at, reason = free, previous
            for tile in first_use.get(one.index, ()):
                pool = pools.setdefault((tile.core, tile.region), _Pool(tile.region))
                room, owner = pool.take(footprint(tile))
                if room > at:
                    at, reason = room, owner
            if one.engine == "dma":
                at, reason = bandwidth.setdefault(one.core, _Gaps()).place(at, reason, one)
            start[one.index], end[one.index], why[one.index] = at, at + one.us + one.latency_us, reason
            engine_last[one.core, one.engine] = one.index
            for tile in last_use.get(one.index, ()):
                pools[tile.core, tile.region].release(footprint(tile), end[one.index], one.index)
        path = []
        at_index = max(range(count), key=end.__getitem__, default=-1)
        makespan = end[at_index] if count else 0.0
        while at_index >= 0:
            path.append(at_index)
            at_index = why[at_index]
        return Schedule(makespan, start, end, path[::-1])

    def critical_path_us(self) -> float:
        """The makespan of schedule()."""
        return self.schedule().makespan

    def table(self) -> str:
        """The trace as text: engines, instructions, memory, critical path, and the busiest kernel lines."""
        plan, peaks, busy = self.schedule(), self.peak(), self.busy()
        on_path = collections.Counter()
        for index in plan.path:
            on_path[self.instructions[index].engine] += 1
        rows = [f"{'engine':8} {'instructions':>12} {'busy us':>10} {'of path':>8} {'on path':>8}"]
        for engine in ENGINES:
            number = sum(one.engine == engine for one in self.instructions)
            if number:
                share = busy[engine] / plan.makespan if plan.makespan else 0.0
                rows.append(f"{engine:8} {number:12} {busy[engine]:10.2f} {share:8.0%} {on_path[engine]:8}")
        rows.append("  ".join(f"{name} {number}" for name, number in self.counts().items()))
        rows.append(
            f"DMA {self.dma_bytes() / 1e6:.3f} MB   peak per partition: SBUF {peaks['sbuf'] / 1024:.1f} KiB, "
            f"PSUM {peaks['psum'] // costs.PSUM_BANK_BYTES} banks   critical path {plan.makespan:.2f} us (predicted)"
        )
        for line, engine, number, us in self.lines()[:5]:
            rows.append(f"  {us:9.2f} us {engine:7} {number:6} x {line}")
        return "\n".join(rows)


class _Gaps:
    """When the DMA engines of a core move data, as disjoint intervals (start, end, instruction) in order."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float, int]] = []

    def place(self, ready: float, reason: int, one: Instruction) -> tuple[float, int]:
        """The earliest start from ``ready`` on where the transfer fits, and which instruction it had to follow."""
        at, position = ready, bisect.bisect_left(self.taken, (ready,))
        if position and self.taken[position - 1][1] > at:
            at, reason = self.taken[position - 1][1:]
        while position < len(self.taken) and self.taken[position][0] < at + one.us:
            at, reason = self.taken[position][1:]
            position += 1
        self.taken.insert(position, (at, at + one.us, one.index))
        return at, reason


class _Pool:
    """Memory of one region: which bytes become free when."""

    def __init__(self, region) -> None:
        self.free = costs.SBUF_USABLE_BYTES if region is SBUF else costs.PSUM_BANKS * costs.PSUM_BANK_BYTES
        self.coming: list[tuple[float, int, int]] = []

    def take(self, nbytes: int) -> tuple[float, int]:
        """When there is room for ``nbytes``, and which instruction's end makes it."""
        at, owner = 0.0, -1
        while self.free < nbytes and self.coming:
            at, owner, released = heapq.heappop(self.coming)
            self.free += released
        self.free -= nbytes
        return at, owner

    def release(self, nbytes: int, at: float, owner: int) -> None:
        heapq.heappush(self.coming, (at, owner, nbytes))


def footprint(tile: TileUse) -> int:
    """Bytes per partition that a tile takes; in PSUM whole banks."""
    if tile.region is PSUM:
        return -(-tile.partition_bytes // costs.PSUM_BANK_BYTES) * costs.PSUM_BANK_BYTES
    return tile.partition_bytes


def _uses(tiles: list[TileUse]) -> tuple[dict[int, list[TileUse]], dict[int, list[TileUse]]]:
    first: dict[int, list[TileUse]] = {}
    last: dict[int, list[TileUse]] = {}
    for tile in tiles:
        if tile.first >= 0:
            first.setdefault(tile.first, []).append(tile)
            last.setdefault(tile.last, []).append(tile)
    return first, last
