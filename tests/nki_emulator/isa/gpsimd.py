# SPDX-License-Identifier: Apache-2.0
"""GpSimd: affine patterns, gathers inside SBUF, positions of nonzeros."""

import math

import numpy as np

from ..access import copy_values, read, read_rows, write
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
