# SPDX-License-Identifier: Apache-2.0
"""GpSimd: affine patterns, gathers inside SBUF, positions of nonzeros, top-k, reduction over partitions."""

import math

import numpy as np

from .. import costs
from ..access import copy_values, read, read_float32, read_rows, write, write_float32
from ..dtypes import INTEGERS, NUMPY, from_float32
from ..machine import instruction, record
from ..memory import SBUF
from ..operands import same_shape, tile
from ..operators import OPERATORS, Operator
from ..rules import fail
from ..tensor import NkiTensor

INT32 = (-(2**31), 2**31 - 1)
CORES = range(0, 128, 16)
"""First partitions of the eight GpSimd cores."""


def _affine(dst: NkiTensor, pattern, offset: int, channel_multiplier: int) -> np.ndarray:
    """offset + partition * channel_multiplier + the pattern's steps, as [partitions, elements]."""
    if len(pattern) > 4 or math.prod(count for _, count in pattern) != dst.free:
        fail("argument", "pattern", f"{pattern} for dst {dst!r}: up to 4 [step, count] with dst's elements per partition")
    values = np.full((1,), offset, np.int64)
    for step, count in pattern:
        values = (values[:, None] + np.arange(count) * step).reshape(-1)
    values = np.arange(dst.shape[0])[:, None] * channel_multiplier + values[None]
    if values.min() < INT32[0] or values.max() > INT32[1]:
        fail("argument", "pattern", f"values {values.min()} to {values.max()} do not fit int32")
    return values


@instruction
def iota(dst, pattern, offset=0, channel_multiplier=0, name=None) -> None:
    """dst[p, ...] = offset + p * channel_multiplier + sum of step * index, computed in int32."""
    tile("dst", dst, (SBUF,), free_dimensions=4)
    values = _affine(dst, pattern, offset, channel_multiplier)
    if dst.dtype in INTEGERS:
        low, high = np.iinfo(NUMPY[dst.dtype]).min, np.iinfo(NUMPY[dst.dtype]).max
        if values.min() < low or values.max() > high:
            fail("argument", "pattern", f"values {values.min()} to {values.max()} do not fit {dst.dtype}")
    write(dst, values.astype(NUMPY[dst.dtype]) if dst.dtype in INTEGERS else from_float32(values.astype(np.float32), dst.dtype))
    record("gpsimd", dst.free, writes=[dst])


@instruction
def affine_select(
    dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=OPERATORS["equal"], offset=0, name=None
) -> None:
    """dst = on_true_tile where cmp_op(affine value, 0), else on_false_value."""
    tile("dst", dst, (SBUF,), free_dimensions=4)
    tile("on_true_tile", on_true_tile, (SBUF,), free_dimensions=4)
    same_shape(dst, on_true_tile=on_true_tile)
    if not isinstance(cmp_op, Operator) or cmp_op.name not in (
        "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    ):  # fmt: skip
        fail("operator", "cmp_op", repr(cmp_op))
    chosen = cmp_op.function(_affine(dst, pattern, offset, channel_multiplier), 0) != 0
    taken = copy_values(dst, on_true_tile, read_rows(on_true_tile, "on_true_tile"))
    other = from_float32(np.full((1, 1), on_false_value, np.float32), dst.dtype)
    write(dst, np.where(chosen, taken, other))
    record("gpsimd", dst.free, reads=[on_true_tile], writes=[dst])


@instruction
def nc_n_gather(dst, data, indices, name=None) -> None:
    """dst[p, i] = data[p, indices[p, i]] over the flattened free dimensions."""
    for label, one in (("dst", dst), ("data", data), ("indices", indices)):
        tile(label, one, (SBUF,))
    same_shape(dst, indices=indices)
    if indices.dtype != "uint32" or data.dtype != dst.dtype or data.shape[0] != dst.shape[0]:
        fail("dtype-operand", "indices, data", f"{indices!r}, {data!r} to {dst!r}: uint32 indices, data like dst")
    positions = read_rows(indices, "indices").astype(np.int64)
    if positions.max() >= data.free:
        fail("indirect-bounds", "indices", f"{positions.max()} of {data.free} elements per partition")
    write(dst, np.take_along_axis(read_rows(data, "data"), positions, 1))
    record("gpsimd", dst.free, reads=[data, indices], writes=[dst])


@instruction
def local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None) -> None:
    """Each GpSimd core gathers from its 16 partitions at the positions in its 16 partitions of ``index``, column by column."""
    for label, one in (("dst", dst), ("src_buffer", src_buffer), ("index", index)):
        tile(label, one, (SBUF,))
    if src_buffer.shape[0] != index.shape[0] or index.shape[0] % 16 or dst.shape[0] != index.shape[0]:
        fail("shape", "index", f"{index!r} with {src_buffer!r} and {dst!r}: equal partitions, a multiple of 16")
    if index.dtype != "uint16" or dst.dtype != src_buffer.dtype or num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        fail("argument", "index, num_elem_per_idx", f"{index!r}, {num_elem_per_idx}: uint16, and 1, 2, 4, 8, 16 or 32")
    count = index.free * 16 if num_valid_indices is None else num_valid_indices
    if count > min(4096, index.free * 16) or dst.free != count * num_elem_per_idx:
        fail("argument", "num_valid_indices", f"{count}: at most 4096, and dst of {count * num_elem_per_idx} elements")
    source, wanted = read_rows(src_buffer, "src_buffer"), read_rows(index, "index")
    result = np.empty((dst.shape[0], dst.free), source.dtype)
    for first in range(0, dst.shape[0], 16):
        starts = wanted[first : first + 16].T.reshape(-1)[:count].astype(np.int64)
        columns = (starts[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        if columns.max() >= source.shape[1]:
            fail("indirect-bounds", "index", f"{columns.max()} of {source.shape[1]} elements per partition")
        result[first : first + 16] = source[first : first + 16, columns]
    write(dst, result)
    record("gpsimd", dst.free, reads=[src_buffer, index], writes=[dst])


@instruction
def nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None) -> None:
    """Of partitions 0, 16, .., 112: positions of nonzeros plus index_offset, then padding, then their count."""
    tile("dst", dst, (SBUF,))
    tile("src", src, (SBUF,))
    if src.dtype not in ("float32", "int32") or dst.dtype != "int32":
        fail("dtype-operand", "src, dst", f"{src!r}, {dst!r}: float32 or int32 to int32")
    if dst.shape[0] != src.shape[0] or dst.free != src.free + 1:
        fail("shape", "dst", f"{dst!r}, expected [{src.shape[0]}, {src.free + 1}]")
    for row in [first for first in CORES if first < src.shape[0]]:
        found = np.flatnonzero(read(src[row : row + 1].reshape((1, src.free)), "src"))
        line = np.full(src.free + 1, padding_val, np.int32)
        line[: found.size] = found + index_offset
        line[-1] = found.size
        write(dst[row : row + 1], line)
    record("gpsimd", src.free, reads=[src], writes=[dst])


@instruction
def topk(val_dst, idx_dst, src, n, name=None) -> None:
    """The K largest bf16 values of each 16-partition snake of n values, ascending, with their positions.

    Each snake's result is written to its 16 partitions. Equal values: the documentation gives no order; here the lower position
    counts as larger.
    """
    for label, one, dtype in (("val_dst", val_dst, "bfloat16"), ("idx_dst", idx_dst, "uint32"), ("src", src, "bfloat16")):
        tile(label, one, (SBUF,))
        if one.dtype != dtype or one.shape[0] != src.shape[0] or one.ndim != 2:
            fail("dtype-operand", label, f"{one!r}, expected {dtype} [{src.shape[0]}, ..]")
    k = val_dst.free
    if src.shape[0] % 16 or not 8 <= n < 65536 or not 1 <= k < 32768 or k > n or src.free * 16 < n or idx_dst.free != k:
        fail("argument", "n", f"n={n}, k={k}, src {src!r}")
    values = read_float32(src, "src")
    best, positions = np.empty((src.shape[0], k), np.float32), np.empty((src.shape[0], k), np.uint32)
    for first in range(0, src.shape[0], 16):
        snake = values[first : first + 16].T.reshape(-1)[:n]
        chosen = np.argsort(-snake, kind="stable")[:k][::-1]
        best[first : first + 16], positions[first : first + 16] = snake[chosen], chosen
    write_float32(val_dst, best)
    write(idx_dst, positions)
    record("gpsimd", 4 * n + k, reads=[src], writes=[val_dst, idx_dst])


@instruction
def tensor_partition_reduce(dst, op, data, name=None) -> None:
    """dst[0, :] = reduction of data over its partitions: nl.add or nl.maximum."""
    tile("dst", dst, (SBUF,))
    tile("data", data, (SBUF,))
    if not isinstance(op, Operator) or op.name not in ("add", "maximum"):
        fail("operator", "op", f"{op!r}, expected nl.add or nl.maximum")
    if (dst.shape[0], dst.free) != (1, data.free):
        fail("shape", "dst", f"{dst!r}, expected [1, {data.free}]")
    values = read_float32(data, "data")
    write_float32(dst, (values.sum(0, dtype=np.float32) if op.name == "add" else values.max(0))[None])
    record("gpsimd", costs.PARTITION_REDUCE * data.free, reads=[data], writes=[dst])
