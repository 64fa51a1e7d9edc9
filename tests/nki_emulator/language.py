# SPDX-License-Identifier: Apache-2.0
"""nki.language: dtypes, memory, allocation, loops, launch grid, and the operators. The high-level maths is left out."""

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import costs, dtypes
from .access import read, write
from .machine import Loop, allocate, current, record
from .memory import ON_CHIP, MemoryRegion, Storage
from .operators import OPERATORS
from .rules import fail
from .tensor import NKIObject, NkiTensor, Register, ds

globals().update(OPERATORS)
globals().update({name: name for name in dtypes.NUMPY})
float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4 = "float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm

__all__ = [
    *OPERATORS, *dtypes.NUMPY,
    "MemoryRegion", "NKIObject", "NkiTensor", "affine_range", "device_print", "ds", "dynamic_range", "float4_e2m1fn_x4",
    "float8_e4m3fn_x4", "float8_e5m2_x4", "fori_loop", "full", "hbm", "is_hbm", "is_on_chip", "is_psum", "is_sbuf", "load",
    "ndarray", "no_reorder", "num_programs", "ones", "private_hbm", "program_id", "program_ndim", "psum", "sbuf",
    "sequential_range", "shared_constant", "shared_hbm", "shared_identity_matrix", "static_range", "store", "tile_size",
    "while_loop", "zeros",
]  # fmt: skip


class _TileSize(NKIObject):
    """Hardware tile limits."""

    pmax = costs.PARTITIONS
    psum_fmax = psum_bank_fmax = costs.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = costs.PSUM_BANK_BYTES
    psum_num_banks = costs.PSUM_BANKS
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    sbuf_size_bytes = costs.SBUF_USABLE_BYTES * costs.PARTITIONS
    sbuf_fmax = costs.SBUF_USABLE_BYTES // 4
    sbuf_fmax_bytes = total_available_sbuf_size = costs.SBUF_USABLE_BYTES


tile_size = _TileSize()
affine_range = sequential_range = static_range = builtins.range


def is_hbm(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is any HBM."""
    return buffer not in ON_CHIP


def is_on_chip(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is SBUF or PSUM."""
    return buffer in ON_CHIP


def is_psum(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is PSUM."""
    return buffer is MemoryRegion.psum


def is_sbuf(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is SBUF."""
    return buffer is MemoryRegion.sbuf


def ndarray(shape, dtype, buffer=sbuf, name: str = "", address=None) -> NkiTensor:
    """A new tensor; its contents are poison until written."""
    if address is not None:
        fail("unsupported", "address", "manual allocation")
    if dtype not in dtypes.NUMPY:
        fail("dtype", name or "ndarray", f"{dtype!r}, expected one of {', '.join(dtypes.NUMPY)}")
    if not all(isinstance(size, int | np.integer) and size > 0 for size in shape):
        fail("argument", "shape", f"{shape}, expected positive integers")
    shape = tuple(int(size) for size in shape)
    if buffer in ON_CHIP:
        if len(shape) < 2:
            fail("two-dimensions", name or "ndarray", f"shape {shape}")
        if shape[0] > costs.PARTITIONS:
            fail("partitions", name or "ndarray", f"shape {shape}")
        limit = costs.PSUM_BANKS * costs.PSUM_BANK_BYTES if buffer is psum else costs.SBUF_USABLE_BYTES
        if (nbytes := math.prod(shape[1:]) * dtypes.SIZE[dtype]) > limit:
            fail(f"{buffer.value}-capacity", name or "ndarray", f"shape {shape} takes {nbytes} of {limit} bytes per partition")
    storage = allocate(buffer, shape[0] if buffer in ON_CHIP else 1, math.prod(shape) * dtypes.SIZE[dtype], name)
    return NkiTensor(shape, dtype, storage, buffer, name)


def full(shape, fill_value, dtype, buffer=sbuf, name: str = "") -> NkiTensor:
    """A new tile filled with a constant by nisa.memset."""
    from .isa import memset

    tensor = ndarray(shape, dtype, buffer, name)
    memset(tensor, fill_value)
    return tensor


def zeros(shape, dtype, buffer=sbuf, name: str = "") -> NkiTensor:
    """A new tile of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape, dtype, buffer=sbuf, name: str = "") -> NkiTensor:
    """A new tile of ones."""
    return full(shape, 1, dtype, buffer, name)


def load(src: NkiTensor, dtype=None) -> NkiTensor:
    """A new SBUF tile with the contents of an HBM tensor."""
    from .isa import dma_copy

    tile = ndarray(src.shape, dtype or src.dtype)
    dma_copy(dst=tile, src=src)
    return tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy an SBUF tile to HBM."""
    from .isa import dma_copy

    dma_copy(dst=dst, src=value)


def in_hbm(values: np.ndarray) -> NkiTensor:
    """An array as a tensor in shared HBM, without a copy where it is contiguous."""
    values = np.ascontiguousarray(values)
    if values.dtype not in dtypes.NAME:
        fail("dtype", "array", f"{values.dtype}, expected one of {', '.join(dtypes.NUMPY)}")
    raw = values.reshape(-1).view(np.uint8)
    return NkiTensor(values.shape, dtypes.NAME[values.dtype], Storage(shared_hbm, 1, raw.size, "", raw), shared_hbm)


def shared_constant(constant) -> NkiTensor:
    """A constant of the binary in shared HBM, from an array or a path of a .npy file."""
    values = np.load(constant) if isinstance(constant, str) else constant
    return in_hbm(np.array(values))


def shared_identity_matrix(n: int, dtype: str = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """An n x n identity matrix in SBUF, loaded from a constant."""
    tensor = ndarray((n, n), dtype) if dst is None else dst
    write(tensor, np.eye(n, dtype=np.float32).astype(dtypes.NUMPY[dtype]))
    nbytes = tensor.size * dtypes.SIZE[dtype]
    record("dma", us=nbytes / costs.DMA_BYTES_PER_US, latency_us=costs.DMA_FIXED_US, nbytes=nbytes, writes=[tensor],
           name="shared_identity_matrix")  # fmt: skip
    return tensor


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print the values of a tensor now."""
    print(print_prefix, read(tensor, "tensor"))


def program_id(axis: int = 0) -> int:
    """Number of the core that runs."""
    return current().number


def num_programs(axes: int = 0) -> int:
    """How many cores run the kernel."""
    return len(current().machine.cores)


def program_ndim() -> int:
    """1 where the kernel was launched with kernel[cores], else 0."""
    return int(current().machine.grid)


@contextlib.contextmanager
def no_reorder() -> Iterator[None]:
    """Instructions inside keep program order. The emulator always does; dynamic loops are refused inside."""
    core = current()
    outer, core.no_reorder = core.no_reorder, True
    try:
        yield
    finally:
        core.no_reorder = outer


def dynamic_range(start, stop=None, step=1) -> None:
    """Deprecated in NKI 0.6, and refused here."""
    fail("loop-body", "dynamic_range", "deprecated in NKI 0.6; use nl.fori_loop")


def fori_loop(lower, upper, body_fun: Callable[[Register], None], step: int = 1) -> None:
    """``body_fun(i)`` for i = lower, lower + step, .. < upper, on the device; bounds are integers or registers."""
    if not isinstance(step, int) or step < 1:
        fail("loop-variable", "step", repr(step))
    positions = builtins.range(_bound("lower", lower), _bound("upper", upper), step)
    with _loop("fori_loop", [lower, upper]) as next_iteration:
        for position in positions:
            with next_iteration():
                if body_fun(Register(position, frozen=True)) is not None:
                    fail("loop-variable", "body_fun", "returned a value")
    current().trips.append(len(positions))


def while_loop(init: Register, body_fun: Callable[[Register], Register]) -> None:
    """``r = init; while r != 0: r = body_fun(r)`` on the device."""
    if not isinstance(init, Register):
        fail("loop-variable", "init", f"{type(init).__name__}, expected a register")
    trips, condition = 0, Register(_bound("init", init))
    condition.ready = init.ready
    with _loop("while_loop", [init]) as next_iteration:
        while condition.value:
            with next_iteration():
                condition = body_fun(condition)
                if not isinstance(condition, Register):
                    fail(
                        "loop-variable",
                        "body_fun",
                        f"returned {type(condition).__name__}, expected the next condition register",
                    )
            trips += 1
    current().trips.append(trips)


def _bound(operand: str, value: Any) -> int:
    if isinstance(value, Register):
        if value.value is None:
            fail("uninitialised", operand, "a register that was never written")
        return int(value.value)
    if not isinstance(value, int | np.integer):
        fail("loop-variable", operand, f"{type(value).__name__}, expected an integer or a register")
    return int(value)


@contextlib.contextmanager
def _loop(name: str, bounds: list) -> Iterator[Callable]:
    """A dynamic loop around iterations: what follows waits for its bounds; every iteration must issue the same."""
    core, loop = current(), Loop()
    if core.no_reorder:
        fail("no-reorder", name, "inside nl.no_reorder")
    ready = [bound.ready for bound in bounds if isinstance(bound, Register)]
    core.after = record("sync", costs.LOOP_CYCLES, after=ready, name=name)

    @contextlib.contextmanager
    def next_iteration() -> Iterator[None]:
        loop.position, loop.counted = 0, 0
        record("sync", costs.LOOP_CYCLES, name=name)
        yield
        if loop.iteration > 0 and loop.counted != len(loop.issued):
            fail(
                "loop-body", name, f"{loop.counted} instructions in iteration {loop.iteration}, {len(loop.issued)} in the first"
            )
        loop.iteration += 1

    core.loops.append(loop)
    try:
        yield next_iteration
    finally:
        core.loops.pop()


def __getattr__(name: str) -> Any:
    raise AttributeError(f"nki.language.{name}: the emulator does not have it; see nki_emulator/language.py for what it has")
