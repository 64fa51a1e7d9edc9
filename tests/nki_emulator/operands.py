# SPDX-License-Identifier: Apache-2.0
"""Checks that the operands of an engine's instruction must pass before it runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import costs
from .access import read_float32
from .dtypes import HALF, NOT_ON_TRN2, SIZE
from .enums import engine as engines
from .memory import ON_CHIP, PSUM, SBUF, MemoryRegion
from .operators import Operator
from .rules import fail
from .tensor import NkiTensor


def tile(operand: str, tensor: Any, regions: Sequence[MemoryRegion] = ON_CHIP, free_dimensions: int = 3) -> None:
    """Check one tile: memory, dtype, partitions, start partition, contiguous partitions, dimensions of the pattern."""
    if not isinstance(tensor, NkiTensor):
        fail("tile", operand, type(tensor).__name__)
    if tensor.buffer not in regions:
        fail("buffer", operand, f"{tensor!r}, expected {' or '.join(region.value for region in regions)}")
    if tensor.dtype in NOT_ON_TRN2:
        fail("dtype-trn2", operand, f"{tensor!r}")
    if tensor.dynamic is not None and tensor.dynamic.rows:
        fail("indirect", operand, f"{tensor!r} with a vector offset")
    count, start = tensor.shape[0], tensor.start_partition
    if not 1 <= count <= costs.PARTITIONS:
        fail("partitions", operand, f"{tensor!r}")
    step = 128 if count > 64 else 64 if count > 32 else 32
    if start % step:
        fail("start-partition", operand, f"{tensor!r}: {count} partitions from {start}")
    if count > 1 and tensor.strides[0] != tensor.partition_stride:
        fail("partition-step", operand, f"{tensor!r}: stride {tensor.strides[0]}, expected {tensor.partition_stride}")
    pattern = _free_pattern(tensor)
    if len(pattern) > free_dimensions:
        fail("free-dimensions", operand, f"{tensor!r}: {len(pattern)} free dimensions in {tensor.get_pattern()}")
    if any(stride >= 1 << 15 for _, stride in pattern):
        fail("stride", operand, f"{tensor!r}: {tensor.get_pattern()}")


def _free_pattern(tensor: NkiTensor) -> list[tuple[int, int]]:
    """(size, stride) of the free dimensions, contiguous ones merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[1:], tensor.strides[1:], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def same_shape(dst: NkiTensor, **tensors: NkiTensor) -> None:
    """Fail unless each has dst's partitions and elements per partition."""
    for name, tensor in tensors.items():
        if (tensor.shape[0], tensor.free) != (dst.shape[0], dst.free):
            fail("shape", name, f"{tensor!r} against dst {dst!r}")


def not_both_psum(**tensors: Any) -> None:
    """Fail where both input tiles are in PSUM."""
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, NkiTensor) and tensor.buffer is PSUM}
    if len(found) > 1:
        fail("both-psum", " and ".join(found), ", ".join(repr(tensor) for tensor in found.values()))


def no_psum(engine: engines, **tensors: Any) -> None:
    """Fail where GpSimd would access PSUM."""
    for name, tensor in tensors.items():
        if engine is engines.gpsimd and isinstance(tensor, NkiTensor) and tensor.buffer is PSUM:
            fail("gpsimd-psum", name, repr(tensor))


def choose(engine: engines, allowed: Sequence[engines], default: engines) -> engines:
    """The engine that runs the instruction: the asked one, or the default for ``unknown``."""
    if engine is engines.unknown:
        return default
    if engine not in allowed:
        fail("engine", "engine", f"{engine.name}, expected {', '.join(one.name for one in allowed)}")
    return engine


def vector(operand: str, value: Any, partitions: int, dtypes: Sequence[str] | None = ("float32",)) -> np.ndarray | np.float32:
    """A scalar operand as fp32, or a [partitions, 1] tile as fp32 [partitions, 1]."""
    if not isinstance(value, NkiTensor):
        if not isinstance(value, int | float | np.integer | np.floating):
            fail("vector-operand", operand, type(value).__name__)
        return np.float32(value)
    tile(operand, value)
    if value.shape[0] != partitions or value.free != 1:
        fail("vector-operand", operand, f"{value!r}, expected [{partitions}, 1]")
    if dtypes is not None and value.dtype not in dtypes:
        fail("dtype-operand", operand, f"{value!r}, expected {' or '.join(dtypes)}")
    return read_float32(value, operand)


def arithmetic(operand: str, op: Any, unary: bool | None = None) -> Operator:
    """An arithmetic ALU operator of trn2."""
    _operator(operand, op)
    if op.bitwise or not op.alu or (unary is not None and op.unary is not unary):
        fail("operator", operand, repr(op))
    return op


def alu(operand: str, op: Any) -> Operator:
    """Any ALU operator of trn2, arithmetic or bitwise."""
    _operator(operand, op)
    if not op.alu:
        fail("operator", operand, repr(op))
    return op


def _operator(operand: str, op: Any) -> None:
    if not isinstance(op, Operator):
        fail("operator", operand, repr(op))


def tensors(*operands: Any) -> list[NkiTensor]:
    """Those operands that are tensors."""
    return [one for one in operands if isinstance(one, NkiTensor)]


def vector_cycles(dst: NkiTensor, *sources: NkiTensor, two_inputs: bool = False) -> float:
    """VectorE cycles per trainium2_arch.rst: one element per lane and cycle, two inputs take two; bf16/fp16 run faster."""
    tiles = (dst, *sources)
    elements = max(one.free for one in tiles)
    half, in_sbuf = all(one.dtype in HALF for one in tiles), all(one.buffer is SBUF for one in tiles)
    slow = 2 if any(one.strides[-1] * SIZE[one.dtype] > costs.STRIDE_BYTES and one.shape[-1] > 1 for one in tiles) else 1
    if two_inputs:
        return elements * slow * (1 if half and in_sbuf else 2)
    dense = all(one.strides[-1] == 1 for one in tiles)
    if half and (in_sbuf or dense):
        return elements * slow / (4 if in_sbuf and dense else 2)
    return elements * slow
