# SPDX-License-Identifier: Apache-2.0
"""Registers, and what the two cores do together."""

import numpy as np

from .. import costs
from ..access import read, read_rows, write
from ..dtypes import INTEGERS, NUMPY, SIZE
from ..enums import dma_engine as dma_engines
from ..enums import engine as engines
from ..machine import current, instruction, record
from ..memory import PSUM, SBUF, MemoryRegion
from ..operands import same_shape, tile
from ..rules import fail
from ..tensor import NkiTensor, Register


@instruction
def register_alloc(x=None) -> Register:
    """A register, initialised where ``x`` is an integer."""
    if x is not None and not isinstance(x, int | np.integer):
        fail("register", "x", f"{type(x).__name__}, expected None or an integer")
    return Register(None if x is None else int(x))


@instruction
def register_move(dst, src) -> None:
    """dst = an integer or another register's value."""
    _target(dst)
    if isinstance(src, Register):
        dst.value, dst.ready = src.value, src.ready
    elif isinstance(src, int | np.integer):
        dst.value, dst.ready = int(src), None
    else:
        fail("register", "src", f"{type(src).__name__}, expected an integer or a register")


@instruction
def register_load(dst, src) -> None:
    """dst = the one element of a tensor in SBUF or HBM."""
    _target(dst)
    if not isinstance(src, NkiTensor) or src.size != 1 or src.buffer is PSUM:
        fail("tile", "src", f"{src!r}, expected one element in SBUF or HBM")
    if src.dtype not in INTEGERS:
        fail("dtype-operand", "src", f"{src!r}, expected an integer dtype: registers here are bounds and offsets")
    dst.value = int(read(src, "src").reshape(-1)[0])
    latency = 0.0 if src.on_chip else costs.DMA_FIXED_US
    dst.ready = record(
        "sync", costs.ISSUE_CYCLES, us=costs.ISSUE_CYCLES / costs.GHZ["sync"] / 1e3, latency_us=latency, reads=[src]
    )


@instruction
def register_store(dst, src) -> None:
    """The one element of a tensor in SBUF or HBM = a register's value."""
    if not isinstance(dst, NkiTensor) or dst.size != 1 or dst.buffer is PSUM:
        fail("tile", "dst", f"{dst!r}, expected one element in SBUF or HBM")
    if not isinstance(src, Register) or src.value is None:
        fail("register", "src", "expected a register that holds a value")
    write(dst, np.array(src.value).astype(NUMPY[dst.dtype]))
    record("sync", costs.ISSUE_CYCLES, writes=[dst], after=[src.ready])


def _target(dst) -> None:
    if not isinstance(dst, Register):
        fail("register", "dst", f"{type(dst).__name__}, expected a register")
    if dst.frozen:
        fail("loop-variable", "dst", "the loop variable")


@instruction
def core_barrier(data, cores, engine=engines.gpsimd, name=None) -> None:
    """Both cores wait for each other; what either wrote to ``data`` before, both may read after."""
    if not isinstance(data, NkiTensor) or data.buffer is not MemoryRegion.shared_hbm:
        fail("buffer", "data", f"{data!r}, expected shared HBM")
    core = current()
    if tuple(cores) != (0, 1) or len(core.machine.cores) != 2:
        fail("argument", "cores", f"{cores} on {len(core.machine.cores)} cores, expected (0, 1) on two")

    def together() -> None:
        data.storage.written_by, data.storage.read_by = None, []
        for each in core.machine.cores:
            record(engine.name, us=costs.BARRIER_US, writes=[data], on=each, name="core_barrier")

    core.machine.meet(core, ("core_barrier", repr(data), id(data.storage)), together)


@instruction
def sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engines.dma, name=None) -> None:
    """Send ``src`` to the other core while receiving its ``src`` into ``dst``, both in SBUF."""
    tile("src", src, (SBUF,))
    tile("dst", dst, (SBUF,))
    same_shape(dst, src=src)
    core = current()
    if dst.dtype != src.dtype or dst.shape != src.shape:
        fail("shape", "src", f"{src!r} against dst {dst!r}")
    if len(core.machine.cores) != 2 or {send_to_rank, recv_from_rank} != {1 - core.number}:
        fail(
            "argument", "ranks", f"to {send_to_rank}, from {recv_from_rank} on core {core.number} of {len(core.machine.cores)}"
        )
    nbytes = src.size * SIZE[src.dtype]
    if dma_engine is dma_engines.gpsimd_dma and src.free * SIZE[src.dtype] > 256 * SIZE[src.dtype]:
        fail("argument", "src", f"{src!r}: at most 256 elements per partition by gpsimd_dma")
    machine = core.machine
    machine.mail[core.number] = read_rows(src, "src")
    sent = record("gpsimd" if dma_engine is dma_engines.gpsimd_dma else "dma", us=nbytes / costs.DMA_BYTES_PER_US,
                  latency_us=costs.DMA_FIXED_US, nbytes=nbytes, reads=[src], name="sendrecv_send")  # fmt: skip
    machine.sent[core.number] = sent
    machine.meet(core, ("sendrecv", pipe_id))
    other = 1 - core.number
    write(dst, machine.mail[other])
    received = machine.sent[other]
    machine.meet(core, ("sendrecv done", pipe_id))
    record("sync", costs.ISSUE_CYCLES, writes=[dst], after=[received, sent])
