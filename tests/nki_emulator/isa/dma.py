# SPDX-License-Identifier: Apache-2.0
"""DMA: copies between HBM and SBUF, gathers, scatters, transposes."""

import math

import numpy as np

from .. import costs
from ..access import addresses, copy_values, gather_valid, is_inside, read, resolve, scatter, write
from ..dtypes import SIZE
from ..enums import dge_mode as dge_modes
from ..enums import engine as engines
from ..enums import oob_mode as oob_modes
from ..machine import instruction, record
from ..memory import PSUM
from ..rules import fail
from ..tensor import NkiTensor


@instruction
def dma_copy(
    dst, src, priority=None, oob_mode=oob_modes.error, dge_mode=dge_modes.unknown, engine=engines.unknown, name=None
) -> None:
    """dst = src between HBM and SBUF, cast through fp32 where dtypes differ; rows by index with .ap(vector_offset=...)."""
    _check(dst, src, priority, dge_mode)
    if engine is not engines.unknown and (dge_mode is not dge_modes.hwdge or engine not in (engines.sync, engines.scalar)):
        fail("dge-mode", "engine", f"{engine.name} with {dge_mode.name}; sync or scalar, with hwdge")
    if dst.size != src.size:
        fail("shape", "src", f"{src!r} against dst {dst!r}")
    skip = oob_mode is oob_modes.skip
    if skip and src.dynamic is not None and src.dynamic.rows:
        values, valid = gather_valid(src, "src")
        _store(dst, copy_values(dst, src, values), valid, skip)
    elif not skip or (is_inside(src) and is_inside(dst)):
        _store(dst, copy_values(dst, src, read(src, "src")), None, skip)
    after = []
    for tensor in (dst, src):
        if tensor.dynamic is not None and tensor.dynamic.rows:
            after.append(_descriptors(tensor))
    nbytes = max(dst.size * SIZE[dst.dtype], src.size * SIZE[src.dtype])
    run = min(_run_bytes(dst), _run_bytes(src))
    record(
        "dma", us=_busy_us(nbytes, run), latency_us=costs.DMA_FIXED_US, nbytes=nbytes, reads=[src], writes=[dst], after=after
    )


def _descriptors(tensor: NkiTensor) -> int:
    """Records that GpSimd reads the index of ``tensor`` and writes a descriptor per row, before the transfer."""
    cycles = costs.SWDGE_CYCLES_PER_ROW * tensor.shape[0]
    return record("gpsimd", cycles, name="dma_descriptors", reads=[tensor.dynamic.index])


def _check(dst, src, priority, dge_mode) -> None:
    for operand, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, NkiTensor):
            fail("tile", operand, type(tensor).__name__)
        if tensor.buffer is PSUM:
            fail("dma-psum", operand, repr(tensor))
        if tensor.on_chip and tensor.shape[0] > 1 and tensor.strides[0] != tensor.partition_stride:
            fail("partition-step", operand, f"{tensor!r}: stride {tensor.strides[0]}")
        if tensor.dynamic is None:
            continue
        if tensor.dynamic.rows and dge_mode not in (dge_modes.unknown, dge_modes.swdge):
            fail("dge-mode", operand, f"{tensor!r} with a vector offset and {dge_mode.name}")
        if dge_mode is dge_modes.none:
            fail("dge-mode", operand, f"{tensor!r} with a dynamic index and none")
    if priority is not None:
        fail("argument", "priority", f"{priority}: NeuronCore-v4 only")


def _store(dst: NkiTensor, values: np.ndarray, valid: np.ndarray | None, skip: bool) -> None:
    dst = resolve(dst, "dst")
    if dst.dynamic is None:
        write(dst, values, mask=valid)
        return
    where, inside = addresses(dst)
    if not skip and not inside.all():
        fail("indirect-bounds", "dst", f"{dst!r}: indices {dst.dynamic.values()[:8]}.. of {dst.dynamic.limit}")
    chosen = inside if valid is None else inside & valid.reshape(inside.shape)
    scatter(dst, "dst", where[chosen], values.reshape(inside.shape)[chosen])


def _run_bytes(tensor: NkiTensor) -> int:
    """Contiguous bytes of one descriptor: within a partition on chip, within a row where rows are chosen by index."""
    first = 1 if tensor.on_chip or (tensor.dynamic is not None and tensor.dynamic.rows) else 0
    run = 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))[first:]):
        if size > 1 and stride != run:
            break
        run *= size
    return run * SIZE[tensor.dtype]


def _busy_us(nbytes: int, run: int) -> float:
    descriptors = math.ceil(nbytes / run)
    return (nbytes + descriptors * costs.DMA_RUN_OVERHEAD) / costs.DMA_BYTES_PER_US
