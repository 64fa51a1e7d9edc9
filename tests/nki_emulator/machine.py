# SPDX-License-Identifier: Apache-2.0
"""One launch of a kernel: its cores, which take turns, their loops and registers, and the trace they write."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .memory import ON_CHIP, MemoryRegion, Storage
from .rules import RuleError, fail, kernel_line
from .trace import Instruction, Trace

_local = threading.local()


class Loop:
    """A running fori_loop or while_loop: tiles of its body are allocated in the first iteration and reused in the others."""

    def __init__(self) -> None:
        self.tiles: list[Storage] = []
        self.position = 0
        self.iteration = 0
        self.issued: list[str] = []
        self.counted = 0


class Core:
    """What one physical core knows: its number, its loops, its engines' reduce registers, and what it waits for."""

    def __init__(self, machine: "Machine", number: int) -> None:
        self.machine, self.number = machine, number
        self.instruction = "kernel"
        self.loops: list[Loop] = []
        self.shared_allocations = 0
        self.trips: list[int] = []
        self.after: int | None = None
        self.no_reorder = False
        self.scalar_registers: np.ndarray | None = None
        self.vector_registers: np.ndarray | None = None
        self.registers_after: dict[str, int] = {}
        self.waits_at: tuple | None = None
        self.finished = False


class Stopped(Exception):
    """Unwinds the other core when one has failed."""


class Machine:
    """A launch on ``cores`` physical cores. With two, each runs in a thread, but only one at a time: runs are deterministic."""

    def __init__(self, cores: int, grid: bool) -> None:
        self.cores = [Core(self, number) for number in range(cores)]
        self.grid = grid
        self.trace = Trace()
        self.shared: list[Storage] = []
        self.mail: dict[int, np.ndarray] = {}
        self.sent: dict[int, int] = {}
        self.error: BaseException | None = None
        self._turn = 0
        self._changed = threading.Condition()

    def run(self, function: Callable, arguments: tuple, keywords: dict) -> Any:
        """Call the kernel on every core and return core 0's result."""
        if len(self.cores) == 1:
            with _as_current(self.cores[0]):
                return function(*arguments, **keywords)
        results: list[Any] = [None] * len(self.cores)

        def work(core: Core) -> None:
            with _as_current(core):
                try:
                    self._wait_for_turn(core)
                    results[core.number] = function(*arguments, **keywords)
                except Stopped:
                    pass
                except BaseException as error:
                    self.error = self.error or error
                finally:
                    core.finished = True
                    self._pass_turn()

        threads = [threading.Thread(target=work, args=(core,), daemon=True) for core in self.cores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        first, second = (core.trips for core in self.cores)
        if first != second:
            raise RuleError("trip-counts", self.trace.last_line(), "kernel", "loops",
                            f"core 0 made {first} iterations per loop, core 1 {second}")  # fmt: skip
        return results[0]

    def meet(self, core: Core, point: tuple, together: Callable[[], None] | None = None) -> None:
        """Let ``core`` wait until the other one is at the same ``point``; ``together`` runs once, before either goes on."""
        if len(self.cores) == 1:
            return
        core.waits_at = point
        others = [other for other in self.cores if other is not core]
        for other in others:
            if other.finished:
                fail("barrier", str(point[0]), f"core {core.number} waits, core {other.number} has returned")
            if other.waits_at is not None and other.waits_at != point:
                fail("barrier", str(point[0]), f"core {core.number} waits at {point}, core {other.number} at {other.waits_at}")
        if all(other.waits_at == point for other in others):
            if together is not None:
                together()
            for each in self.cores:
                each.waits_at = None
        self._pass_turn()
        self._wait_for_turn(core)

    def _wait_for_turn(self, core: Core) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == core.number or self.error is not None)
        if self.error is not None:
            raise Stopped

    def _pass_turn(self) -> None:
        """To the next core that neither waits nor has returned; none is left where both wait, which meet() refuses."""
        with self._changed:
            ready = [core.number for core in self.cores if not core.finished and core.waits_at is None]
            if ready:
                self._turn = ready[0]
            else:
                stuck = [core for core in self.cores if not core.finished]
                if stuck and self.error is None:
                    point = stuck[0].waits_at or ("barrier",)
                    self.error = RuleError("barrier", self.trace.last_line(), str(point[0]), "cores",
                                           f"core {stuck[0].number} waits at {point}, the other has returned")  # fmt: skip
            self._changed.notify_all()


@contextlib.contextmanager
def _as_current(core: Core) -> Iterator[None]:
    outer = getattr(_local, "core", None)
    _local.core = core
    try:
        yield
    finally:
        _local.core = outer


def current() -> Core:
    """The core whose kernel runs in this thread."""
    core = getattr(_local, "core", None)
    if core is None:
        raise RuntimeError("nki calls need a running kernel: use nki_emulator.run(kernel, *arrays)")
    return core


def running() -> bool:
    """Whether this thread runs a kernel."""
    return getattr(_local, "core", None) is not None


def instruction_name() -> str:
    """Of the instruction that runs now, for error messages."""
    core = getattr(_local, "core", None)
    return core.instruction if core is not None else "kernel"


def instruction(function: Callable) -> Callable:
    """Mark a function of nki.isa: errors inside it carry its name."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        core = current()
        outer, core.instruction = core.instruction, function.__name__
        try:
            return function(*arguments, **keywords)
        finally:
            core.instruction = outer

    return call


def allocate(region: MemoryRegion, partitions: int, nbytes: int, name: str) -> Storage:
    """Fresh memory for nl.ndarray: shared tensors are one per launch, tiles of a loop body one per loop."""
    core = current()
    if region is MemoryRegion.shared_hbm:
        return _allocate_shared(core, nbytes, name)
    loop = core.loops[-1] if core.loops else None
    if loop is not None and loop.iteration > 0:
        if loop.position >= len(loop.tiles):
            fail(
                "loop-body",
                name or "ndarray",
                f"allocation {loop.position + 1} in iteration {loop.iteration}, not in the first",
            )
        storage = loop.tiles[loop.position]
        loop.position += 1
        if (storage.region, storage.partitions, storage.raw.size) != (region, partitions, nbytes):
            fail("loop-body", name or "ndarray", f"{nbytes} bytes in {region.value}, in the first iteration {storage.raw.size}")
        storage.forget()
        return storage
    storage = Storage(region, partitions, nbytes, name)
    storage.use.core, storage.loop = core.number, loop
    if loop is not None:
        loop.tiles.append(storage)
    if region in ON_CHIP:
        core.machine.trace.tiles.append(storage.use)
    return storage


def _allocate_shared(core: Core, nbytes: int, name: str) -> Storage:
    order, known = core.shared_allocations, core.machine.shared
    core.shared_allocations += 1
    if order == len(known):
        known.append(Storage(MemoryRegion.shared_hbm, 1, nbytes, name))
    elif known[order].raw.size != nbytes:
        fail("shared-allocation", name or "ndarray", f"{nbytes} bytes, the other core has {known[order].raw.size}")
    return known[order]


def record(
    engine: str,
    cycles: float = 0.0,
    *,
    reads: Sequence = (),
    writes: Sequence = (),
    after: Sequence[int | None] = (),
    us: float | None = None,
    latency_us: float = 0.0,
    nbytes: int = 0,
    name: str | None = None,
    on: Core | None = None,
) -> int:
    """Add the running instruction to the trace with the dependencies of its operands; its index.

    ``reads`` and ``writes`` are tensors. ``cycles`` of the engine's clock, or ``us`` of busy time; ``latency_us`` until its
    result is there, beyond that. ``after`` names further instructions it must follow, ``on`` another core than the running one.
    """
    core = on or current()
    trace = core.machine.trace
    index = len(trace.instructions)
    depends = {other for other in after if other is not None}
    if core.after is not None:
        depends.add(core.after)
    touched = []
    for tensor in reads:
        depends |= tensor.storage.history.read(tensor.box(), index)
        touched.append(tensor.storage)
        if tensor.dynamic is not None:
            depends |= tensor.dynamic.dependencies(index)
    for tensor in writes:
        depends |= tensor.storage.history.write(tensor.box(), index)
        touched.append(tensor.storage)
        if tensor.dynamic is not None:
            depends |= tensor.dynamic.dependencies(index)
    for storage in touched:
        storage.use.first = index if storage.use.first < 0 else storage.use.first
        storage.use.last = index
    line = kernel_line()
    trace.add(
        Instruction(index, core.number, engine, name or core.instruction, line, cycles, us, latency_us, nbytes, tuple(depends))
    )
    if core.loops:
        _count_in(core.loops[-1], f"{name or core.instruction} at {line}")
    return index


def _count_in(loop: Loop, issued: str) -> None:
    """A loop body is compiled once: what an iteration issues must be what the first one issued."""
    if loop.iteration == 0:
        loop.issued.append(issued)
    elif loop.counted >= len(loop.issued) or loop.issued[loop.counted] != issued:
        expected = loop.issued[loop.counted] if loop.counted < len(loop.issued) else "nothing more"
        fail("loop-body", "body", f"iteration {loop.iteration} issues {issued}, the first issued {expected}")
    loop.counted += 1
