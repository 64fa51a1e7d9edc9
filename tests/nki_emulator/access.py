# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the elements of a view, with the checks that every access makes."""

import numpy as np

from .dtypes import NUMPY, SIZE, convert, from_float32, to_float32
from .machine import current
from .memory import MemoryRegion
from .rules import fail
from .tensor import NkiTensor


def read(tensor: NkiTensor, operand: str) -> np.ndarray:
    """A copy of the elements, in the shape of the view. Fails where one was never written or lies outside."""
    _check_scope(tensor, operand)
    view = resolve(tensor, operand)
    if view.dynamic is not None:
        where, valid = addresses(view)
        if not valid.all():
            fail("indirect-bounds", operand, _outside(tensor))
        return _gather(view, operand, where)
    storage = view.storage
    if storage.written is not None and not _bytes(storage.written, view).all():
        missing = np.count_nonzero(~_bytes(storage.written, view).all(-1))
        hint = ", or not yet: is a barrier missing?" if _shared(view) else ""
        fail("uninitialised", operand, f"{view!r}: {missing} elements never written{hint}")
    _mark(view, operand, None, writes=False)
    return _elements(view).copy()


def read_float32(tensor: NkiTensor, operand: str) -> np.ndarray:
    """The elements as [partitions, elements per partition] in fp32, as the engines read them."""
    return to_float32(read(tensor, operand), tensor.dtype).reshape(tensor.shape[0], -1)


def read_rows(tensor: NkiTensor, operand: str) -> np.ndarray:
    """The elements as [partitions, elements per partition] in the tensor's own dtype."""
    return read(tensor, operand).reshape(tensor.shape[0], -1)


def write(
    tensor: NkiTensor, values: np.ndarray, operand: str = "dst", mask: np.ndarray | None = None, matmul: bool = False
) -> None:
    """Store ``values``, already in the tensor's dtype; where ``mask`` is given only its true elements."""
    _check_scope(tensor, operand)
    tensor = resolve(tensor, operand)
    storage, values = tensor.storage, values.reshape(tensor.shape)
    if tensor.dynamic is not None:
        where, valid = addresses(tensor)
        if not valid.all():
            fail("indirect-bounds", operand, _outside(tensor))
        scatter(tensor, operand, where, values)
        return
    _mark(tensor, operand, None, writes=True)
    if mask is None:
        _elements(tensor)[...] = values
        if values.nbytes == storage.raw.size and 0 not in tensor.strides:
            storage.written = None
        elif storage.written is not None:
            _bytes(storage.written, tensor)[...] = True
    else:
        chosen = mask.reshape(tensor.shape)
        _elements(tensor)[chosen] = values[chosen]
        if storage.written is not None:
            _bytes(storage.written, tensor)[chosen] = True
    if storage.matmul is not None:
        _bytes(storage.matmul, tensor)[...] = matmul


def write_float32(tensor: NkiTensor, values: np.ndarray) -> None:
    """Store fp32 results, cast to the tensor's dtype."""
    write(tensor, from_float32(values.astype(np.float32, copy=False), tensor.dtype))


def copy_values(target: NkiTensor, source: NkiTensor, values: np.ndarray) -> np.ndarray:
    """``values`` of ``source`` as ``target`` stores them."""
    return convert(values, source.dtype, target.dtype)


def matmul_state(tensor: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Per element of a PSUM view: was it written at all, and was the last write a matmul's."""
    storage = tensor.storage
    written = np.ones(tensor.shape, bool) if storage.written is None else _bytes(storage.written, tensor).all(-1)
    return written, _bytes(storage.matmul, tensor).all(-1)


def resolve(tensor: NkiTensor, operand: str) -> NkiTensor:
    """The static view that one dynamic index selects. A view with an index per row, or with none, stays as it is."""
    dynamic = tensor.dynamic
    if dynamic is None or dynamic.rows:
        return tensor
    index = int(dynamic.values()[0])
    offset = tensor.offset + index * dynamic.stride
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if not 0 <= index < dynamic.limit or (offset + span) * SIZE[tensor.dtype] >= tensor.storage.raw.size:
        fail("indirect-bounds", operand, _outside(tensor))
    return NkiTensor(tensor.shape, tensor.dtype, tensor.storage, tensor.buffer, tensor.name, tensor.strides, offset)


def is_inside(tensor: NkiTensor) -> bool:
    """Whether the one dynamic index of a view, if it has one, is inside its dimension."""
    return tensor.dynamic is None or tensor.dynamic.rows or 0 <= tensor.dynamic.values()[0] < tensor.dynamic.limit


def addresses(tensor: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Of a view with an index per row: element positions in the storage, and which of them have an index inside dimension 0."""
    index = tensor.dynamic.values()
    if index.size < tensor.shape[0]:
        fail("indirect", "vector_offset", f"{index.size} indices for {tensor.shape[0]} rows")
    index = index[: tensor.shape[0]].reshape(-1, *[1] * (tensor.ndim - 1))
    where = tensor.offset + index * tensor.dynamic.stride
    for dim in range(1, tensor.ndim):
        steps = np.arange(tensor.shape[dim]) * tensor.strides[dim]
        where = where + steps.reshape([-1 if d == dim else 1 for d in range(tensor.ndim)])
    valid = np.broadcast_to((index >= 0) & (index < tensor.dynamic.limit), tensor.shape)
    return where, valid & (where >= 0) & (where < tensor.storage.raw.size // SIZE[tensor.dtype])


def _outside(tensor: NkiTensor) -> str:
    return f"{tensor!r}: indices {tensor.dynamic.values()[:8]}.. of {tensor.dynamic.limit}"


def _gather(tensor: NkiTensor, operand: str, where: np.ndarray) -> np.ndarray:
    storage = tensor.storage
    if storage.written is not None and not storage.written[_byte_positions(where, tensor.dtype)].all():
        fail("uninitialised", operand, f"{tensor!r}: gathered elements that were never written")
    _mark(tensor, operand, where, writes=False)
    return _flat(tensor)[where]


def gather_valid(tensor: NkiTensor, operand: str) -> tuple[np.ndarray, np.ndarray]:
    """The elements of a view with an index per row where that is valid (0 elsewhere), and where it is."""
    where, valid = addresses(tensor)
    values = np.zeros(tensor.shape, NUMPY[tensor.dtype])
    values[valid] = _gather(tensor, operand, where[valid])
    return values, valid


def scatter(tensor: NkiTensor, operand: str, where: np.ndarray, values: np.ndarray) -> None:
    """Store ``values`` at element positions ``where`` of the storage."""
    if np.unique(where).size != where.size:
        fail("scatter-unique", operand, f"{tensor!r}: two values for one element")
    _mark(tensor, operand, where, writes=True)
    _flat(tensor)[where] = values
    if tensor.storage.written is not None:
        tensor.storage.written[_byte_positions(where, tensor.dtype)] = True


def _check_scope(tensor: NkiTensor, operand: str) -> None:
    if tensor.storage.loop is not None and tensor.storage.loop not in current().loops:
        fail("loop-scope", operand, f"{tensor!r} was allocated in a loop body")


def _elements(tensor: NkiTensor) -> np.ndarray:
    size = SIZE[tensor.dtype]
    strides = [stride * size for stride in tensor.strides]
    return np.ndarray(tensor.shape, NUMPY[tensor.dtype], tensor.storage.raw.data, tensor.offset * size, strides)


def _bytes(flags: np.ndarray, tensor: NkiTensor) -> np.ndarray:
    """A flag array of the storage's bytes as [*shape, bytes per element]."""
    size = SIZE[tensor.dtype]
    strides = [*(stride * size for stride in tensor.strides), 1]
    return np.ndarray((*tensor.shape, size), flags.dtype, flags.data, tensor.offset * size, strides)


def _flat(tensor: NkiTensor) -> np.ndarray:
    size = SIZE[tensor.dtype]
    return tensor.storage.raw[: tensor.storage.raw.size // size * size].view(NUMPY[tensor.dtype])


def _byte_positions(where: np.ndarray, dtype: str) -> np.ndarray:
    return where[..., None] * SIZE[dtype] + np.arange(SIZE[dtype])


def _mark(tensor: NkiTensor, operand: str, where: np.ndarray | None, writes: bool) -> None:
    """Note who touches shared HBM; fail where the other core wrote (or, for a write, read) it since the last barrier."""
    storage, core = tensor.storage, current()
    if not _shared(tensor):
        return
    if storage.written_by is None:
        if not writes:
            storage.read_by.append((core.number, tensor, where))
            return
        earlier, storage.read_by = storage.read_by, np.zeros(storage.raw.size, np.uint8)
        storage.written_by = np.zeros(storage.raw.size, np.uint8)
        for number, view, positions in earlier:
            _touch(storage.read_by, view, positions, 1 << number)
    mine, other = np.uint8(1 << core.number), np.uint8(3 ^ (1 << core.number))
    touched = _region(storage.written_by, tensor, where)
    if (touched & other).any():
        fail("race", operand, f"{tensor!r} was written by core {1 - core.number} since the last barrier on it")
    if writes and (_region(storage.read_by, tensor, where) & other).any():
        fail("race", operand, f"{tensor!r} was read by core {1 - core.number} since the last barrier on it")
    _touch(storage.written_by if writes else storage.read_by, tensor, where, int(mine))


def _shared(tensor: NkiTensor) -> bool:
    return tensor.buffer is MemoryRegion.shared_hbm and len(current().machine.cores) > 1


def _region(marks: np.ndarray, tensor: NkiTensor, where: np.ndarray | None) -> np.ndarray:
    return _bytes(marks, tensor) if where is None else marks[_byte_positions(where, tensor.dtype)]


def _touch(marks: np.ndarray, tensor: NkiTensor, where: np.ndarray | None, bit: int) -> None:
    if where is None:
        _bytes(marks, tensor)[...] |= np.uint8(bit)
    else:
        marks[_byte_positions(where, tensor.dtype)] |= np.uint8(bit)
