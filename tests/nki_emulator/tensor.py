# SPDX-License-Identifier: Apache-2.0
"""NkiTensor: a strided view of a storage, with the view methods of nki.language.NkiTensor and their constraints."""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .dtypes import NUMPY, SIZE
from .memory import ON_CHIP, Box, MemoryRegion, Storage
from .rules import fail


class NKIObject:
    """Base of classes used in kernels. Annotated fields may stay unset: they are None then."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in inspect.get_annotations(cls):
            if name not in cls.__dict__:
                setattr(cls, name, None)

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@dataclasses.dataclass(frozen=True)
class ds:
    """A slice by start and size."""

    start: int
    size: int


class Register(NKIObject):
    """A virtual register (nisa.VirtualRegister). Its value is the machine's: Python control flow and arithmetic refuse it."""

    def __init__(self, value: int | None = None, frozen: bool = False) -> None:
        self.value, self.frozen, self.ready = value, frozen, None

    def _refuse(self, *_: Any) -> Any:
        fail("register", "register", "used as a Python value")

    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """An index known at run time: a register or tile with one value (``rows`` False), or one value per partition (True).

    ``stride`` is in elements, ``limit`` the size of the indexed dimension.
    """

    index: Any
    stride: int
    limit: int
    rows: bool

    def values(self) -> np.ndarray:
        """The indices as int64: one, or one per row."""
        if isinstance(self.index, Register):
            if self.index.value is None:
                fail("uninitialised", "register", "never written")
            return np.array([self.index.value])
        from .access import read

        return read(self.index, "index").reshape(-1).astype(np.int64)

    def dependencies(self, instruction: int) -> set[int]:
        """Instructions that computed the index."""
        if isinstance(self.index, Register):
            return set() if self.index.ready is None else {self.index.ready}
        return self.index.storage.history.read(self.index.box(), instruction)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


class NkiTensor(NKIObject):
    """A view: element (i0, i1, ..) is at ``offset + sum(strides[k] * ik)`` of the storage, in elements of ``dtype``."""

    __slots__ = ("buffer", "dtype", "dynamic", "name", "offset", "shape", "storage", "strides")

    def __init__(
        self, shape, dtype: str, storage: Storage, buffer: MemoryRegion, name: str = "", strides=None, offset=0, dynamic=None
    ):
        self.shape = tuple(shape)
        self.strides = contiguous_strides(self.shape) if strides is None else tuple(strides)
        self.dtype, self.storage, self.buffer, self.name, self.offset = dtype, storage, buffer, name, offset
        self.dynamic: Dynamic | None = dynamic

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'}{list(self.shape)} {self.dtype} @ {self.buffer.value}"

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    on_chip = property(lambda self: self.buffer in ON_CHIP)

    @property
    def free(self) -> int:
        """Elements per partition."""
        return math.prod(self.shape[1:])

    @property
    def partition_stride(self) -> int:
        """Elements of one partition of the storage, in this dtype."""
        return self.storage.use.partition_bytes // SIZE[self.dtype]

    @property
    def start_partition(self) -> int:
        """The first partition that a static view on chip touches."""
        return self.offset // max(self.partition_stride, 1)

    def box(self) -> Box:
        """The bounding box of the bytes it touches, for dependencies; a dynamic view counts as all it may touch."""
        size, whole = SIZE[self.dtype], self.storage.use.partition_bytes
        if self.dynamic is not None:
            first = self.start_partition if self.on_chip else 0
            return (first, first + (self.shape[0] if self.on_chip else 1), 0, whole, whole)
        steps = sorted(((stride * size, count) for stride, count in zip(self.strides, self.shape, strict=True) if count > 1))
        pitch, rows = (whole, self.shape[0]) if self.on_chip else steps[-1] if steps else (whole, 1)
        row, low = divmod(self.offset * size, pitch) if pitch else (0, self.offset * size)
        inner = zip(self.strides[1:], self.shape[1:], strict=True) if self.on_chip else [(s // size, c) for s, c in steps[:-1]]
        high = low + sum(stride * size * (count - 1) for stride, count in inner) + size
        if high <= pitch:
            return (row, row + rows, low, high, pitch)
        return (0, 1, self.offset * size, self.offset * size + high - low + pitch * (rows - 1), whole)

    def _derive(self, shape, strides, offset=None, dtype=None, dynamic=None) -> "NkiTensor":
        return NkiTensor(
            shape, dtype or self.dtype, self.storage, self.buffer, self.name, strides,
            self.offset if offset is None else offset, dynamic or self.dynamic,
        )  # fmt: skip

    def _need(self, condition: bool, method: str, found: str) -> None:
        if not condition:
            fail("view", f"{self!r}.{method}", found)

    def is_contiguous(self) -> bool:
        """Whether the elements are dense and in order; on chip per partition."""
        expected = contiguous_strides(self.shape)
        pairs = list(zip(self.shape, self.strides, expected, strict=True))[1 if self.on_chip else 0 :]
        return all(size == 1 or stride == dense for size, stride, dense in pairs)

    def is_indirect(self) -> bool:
        """Whether the view has a dynamic index."""
        return self.dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        """[stride, count] per dimension, as .ap takes it."""
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def __setitem__(self, key: Any, value: Any) -> None:
        fail("unsupported", repr(self), "assignment to a view; use nisa.tensor_copy or nisa.dma_copy")

    def __getitem__(self, key: Any) -> "NkiTensor":
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(one is Ellipsis for one in keys):
            at = next(i for i, one in enumerate(keys) if one is Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        keys += [slice(None)] * (self.ndim - len(keys))
        if len(keys) != self.ndim:
            fail("index", repr(self), f"{len(keys)} indices")
        shape, strides, offset, dropped = [], [], self.offset, []
        for dim, one in enumerate(keys):
            size, stride = self.shape[dim], self.strides[dim]
            if self._rows() and dim == 0 and one != slice(None):
                fail("view", repr(self), "the dimension of a vector index is sliced")
            if isinstance(one, int | np.integer):
                position = int(one) + size if one < 0 else int(one)
                if not 0 <= position < size:
                    fail("bounds", repr(self), f"index {one} of dimension {dim}")
                offset += position * stride
                if not (self.on_chip and dim == 0):
                    dropped.append(len(shape))
                shape.append(1)
                strides.append(stride)
            else:
                start, stop, step = self._slice(one, dim)
                offset += start * stride
                shape.append(-(-(stop - start) // step))
                strides.append(stride * step)
        least = 2 if self.on_chip else 1
        kept = max(least - (len(shape) - len(dropped)), 0)
        for at in reversed(dropped[: len(dropped) - kept]):
            del shape[at], strides[at]
        return self._derive(shape, strides, offset)

    def _slice(self, key: Any, dim: int) -> tuple[int, int, int]:
        size = self.shape[dim]
        if isinstance(key, ds):
            key = slice(key.start, key.start + key.size)
        if not isinstance(key, slice):
            fail("index", repr(self), f"{type(key).__name__} in dimension {dim}")
        start, stop, step = (0 if key.start is None else key.start), (size if key.stop is None else key.stop), key.step or 1
        if not all(isinstance(value, int | np.integer) for value in (start, stop, step)):
            fail("index", repr(self), f"slice {key} in dimension {dim}")
        start, stop = (start + size if start < 0 else start), (stop + size if stop < 0 else stop)
        if not (0 <= start < stop <= size and step >= 1):
            fail("bounds", repr(self), f"slice {start}:{stop}:{step} of dimension {dim}")
        return int(start), int(stop), int(step)

    def _rows(self) -> bool:
        return self.dynamic is not None and self.dynamic.rows

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        """[start:end:step] of one dimension."""
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def permute(self, dims: Sequence[int]) -> "NkiTensor":
        """Reorder dimensions; the partitions stay first."""
        self._need(sorted(dims) == list(range(self.ndim)), "permute", f"dims {dims}")
        self._need(dims[0] == 0 or not (self.on_chip or self._rows()), "permute", f"dims {dims} move the partitions")
        return self._derive([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        """Repeat a dimension of size 1, not the partitions."""
        self._need(self.shape[dim] == 1 and not (self.on_chip and dim == 0), "broadcast", f"dim {dim}")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._derive(shape, strides)

    def expand_dim(self, dim: int) -> "NkiTensor":
        """Insert a dimension of size 1, not before the partitions."""
        self._need(dim > 0 or not (self.on_chip or self._rows()), "expand_dim", "dim 0")
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(dim, 1)
        strides.insert(dim, 0)
        return self._derive(shape, strides)

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        """Remove a dimension of size 1, not the partitions."""
        self._need(self.shape[dim] == 1 and (dim > 0 or not (self.on_chip or self._rows())), "squeeze_dim", f"dim {dim}")
        return self._derive(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> "NkiTensor":
        """Split one dimension; one size may be -1."""
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.shape[dim] // -math.prod(sizes)
        self._need(math.prod(sizes) == self.shape[dim], "reshape_dim", f"{shape} of {self.shape[dim]}")
        self._need(dim > 0 or len(sizes) == 1 or not (self.on_chip or self._rows()), "reshape_dim", "the partitions are split")
        inner = [stride * self.strides[dim] for stride in contiguous_strides(sizes)]
        return self._derive(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), (*self.strides[:dim], *inner, *self.strides[dim + 1 :])
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        """Merge dimensions start_dim..end_dim, which must be contiguous."""
        self._need(start_dim > 0 or not (self.on_chip or self._rows()), "flatten_dims", "the partitions are merged")
        merged = math.prod(self.shape[start_dim : end_dim + 1])
        return self.reshape((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]))

    def reshape(self, shape: Sequence[int]) -> "NkiTensor":
        """Another shape of the same elements without a copy; the partitions stay."""
        sizes = list(shape)
        self._need(math.prod(sizes) == self.size, "reshape", f"{shape} has another number of elements")
        self._need(
            not (self.on_chip or self._rows()) or sizes[0] == self.shape[0], "reshape", f"{shape} changes the partitions"
        )
        strides = _reshaped_strides(self.shape, self.strides, sizes)
        if strides is None:
            fail("view", f"{self!r}.reshape", f"{shape} needs a copy")
        return self._derive(sizes, strides)

    def rearrange(self, src_pattern: tuple, dst_pattern: tuple, fixed_sizes: dict[str, int] | None = None) -> "NkiTensor":
        """Split, reorder and merge by names: rearrange(('b', ('h', 'w')), ('b', 'w', 'h'), {'h': 4})."""
        known, view, names = dict(fixed_sizes or {}), self, []
        for group in src_pattern:
            group = (group,) if isinstance(group, str) else group
            view = view.reshape_dim(len(names), [known.get(name, -1) for name in group]) if len(group) > 1 else view
            names += group
        order = [name for group in dst_pattern for name in ((group,) if isinstance(group, str) else group)]
        self._need(sorted(order) == sorted(names), "rearrange", f"{dst_pattern} has other names than {src_pattern}")
        view = view.permute([names.index(name) for name in order])
        for dim, group in enumerate(dst_pattern):
            if not isinstance(group, str) and len(group) > 1:
                view = view.flatten_dims(dim, dim + len(group) - 1)
        return view

    def select(self, dim: int, index: Any) -> "NkiTensor":
        """One position of a dimension, which disappears; ``index`` is an integer, a [1, 1] tile, or a register."""
        if not isinstance(index, NkiTensor | Register):
            return self[(slice(None),) * dim + (index,)]
        self._need(self.dynamic is None, "select", "a second dynamic index")
        self._need(not (self.on_chip and dim == 0), "select", "a dynamic partition")
        dynamic = Dynamic(_scalar_index(index), self.strides[dim], self.shape[dim], rows=False)
        shape, strides = self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :]
        if self.on_chip and len(shape) < 2:
            shape, strides = (*shape, 1), (*strides, 1)
        return self._derive(shape or (1,), strides or (1,), dynamic=dynamic)

    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        """Row ``vector_offset[p]`` of dimension 0 for each partition p; of a tensor in HBM."""
        self._need(dim == 0 and not self.on_chip and self.dynamic is None, "vector_select", f"dim {dim} of {self!r}")
        dynamic = Dynamic(_vector_index(vector_offset), self.strides[0], self.shape[0], rows=True)
        return self._derive((vector_offset.shape[0], *self.shape[1:]), self.strides, dynamic=dynamic)

    def ap(
        self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim: int = 0, dtype=None
    ) -> "NkiTensor":
        """The view [[stride, count], ..] of the storage. It replaces this view's shape and strides, it does not compose."""
        if offset is not None and self.offset:
            fail("ap-offset", repr(self), f"offset {offset} on a view that starts at {self.offset}")
        strides, shape = [int(step) for step, _ in pattern], [int(count) for _, count in pattern]
        view = self._derive(shape, strides, self.offset if offset is None else int(offset), dtype)
        if self.on_chip and shape[0] > 1 and strides[0] != view.partition_stride:
            fail("partition-step", f"{self!r}.ap", f"first stride {strides[0]}, expected {view.partition_stride}")
        self._need(self.dynamic is None, "ap", "on a view with a dynamic index")
        if scalar_offset is not None and vector_offset is not None:
            fail("indirect", f"{self!r}.ap", "both scalar_offset and vector_offset")
        if scalar_offset is not None:
            self._need(not (self.on_chip and indirect_dim == 0), "ap", "a dynamic partition")
            scale = SIZE[self.dtype] // SIZE[view.dtype] if dtype else 1
            view.dynamic = Dynamic(
                _scalar_index(scalar_offset), self.strides[indirect_dim] * max(scale, 1), self.shape[indirect_dim], rows=False
            )
        if vector_offset is not None:
            self._need(indirect_dim == 0 and not self.on_chip, "ap", "vector_offset is for dimension 0 of a tensor in HBM")
            view.dynamic = Dynamic(_vector_index(vector_offset), self.strides[0], self.shape[0], rows=True)
        _check_bounds(view)
        return view

    def view(self, dtype: str) -> "NkiTensor":
        """The same bits as another dtype; the last dimension scales with the size."""
        if dtype not in NUMPY:
            fail("dtype", f"{self!r}.view", str(dtype))
        self._need(self.dynamic is None, "view", "on a view with a dynamic index")
        old, new = SIZE[self.dtype], SIZE[dtype]
        if old == new:
            return self._derive(self.shape, self.strides, dtype=dtype)
        self._need(self.strides[-1] == 1 or self.shape[-1] == 1, "view", "the last dimension is strided")
        numbers = [self.shape[-1], self.offset, *self.strides[:-1]]
        self._need(all(number * old % new == 0 for number in numbers), "view", f"{numbers} do not divide by {new // old}")
        last, offset, *strides = (number * old // new for number in numbers)
        return self._derive((*self.shape[:-1], last), (*strides, 1), offset, dtype)

    reinterpret_cast = view


def _scalar_index(index: Any) -> Any:
    if isinstance(index, NkiTensor) and not (index.size == 1 and index.buffer is MemoryRegion.sbuf):
        fail("indirect", "scalar_offset", f"{index!r}, expected [1, 1] in SBUF or a register")
    if not isinstance(index, NkiTensor | Register):
        fail("indirect", "scalar_offset", type(index).__name__)
    return index


def _vector_index(index: Any) -> NkiTensor:
    if not isinstance(index, NkiTensor) or index.buffer is not MemoryRegion.sbuf or index.dtype not in ("int32", "uint32"):
        fail("indirect", "vector_offset", f"{index!r}, expected int32 or uint32 [partitions, 1] in SBUF")
    return index


def _check_bounds(view: NkiTensor) -> None:
    if any(count < 1 or stride < 0 for stride, count in view.get_pattern()):
        fail("bounds", repr(view), f"pattern {view.get_pattern()}")
    skip = 1 if view.on_chip or view._rows() else 0
    span = sum((count - 1) * stride for stride, count in view.get_pattern()[skip:])
    inside = view.partition_stride if view.on_chip else view.storage.raw.size // SIZE[view.dtype]
    low = view.offset % inside if view.on_chip else view.offset
    if low + span >= inside or (view.on_chip and view.start_partition + view.shape[0] > view.storage.partitions):
        fail("bounds", repr(view), f"pattern {view.get_pattern()} from {view.offset} of {inside} elements")


def _reshaped_strides(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> tuple[int, ...] | None:
    probe = np.lib.stride_tricks.as_strided(np.empty(0, np.int8), tuple(shape), tuple(strides))
    try:
        probe.shape = tuple(target)
    except AttributeError:
        return None
    return tuple(probe.strides)
