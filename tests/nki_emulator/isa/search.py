# SPDX-License-Identifier: Apache-2.0
"""VectorE's search instructions for top-k by eights."""

import numpy as np

from ..access import read_float32, write, write_float32
from ..dtypes import NUMPY
from ..machine import instruction, record
from ..operands import tile, vector_cycles
from ..rules import fail
from ..tensor import NkiTensor

SEARCHED = (8, 16384)


def _check_search(data: NkiTensor, label: str) -> None:
    tile(label, data)
    if not SEARCHED[0] <= data.free <= SEARCHED[1]:
        fail("argument", label, f"{data!r}: {SEARCHED[0]} to {SEARCHED[1]} elements per partition")


def _check_eight(label: str, tensor: NkiTensor, partitions: int, dtypes: tuple[str, ...] | None = None) -> None:
    tile(label, tensor)
    if (tensor.shape[0], tensor.free) != (partitions, 8):
        fail("shape", label, f"{tensor!r}, expected [{partitions}, 8]")
    if dtypes is not None and tensor.dtype not in dtypes:
        fail("dtype-operand", label, f"{tensor!r}, expected {' or '.join(dtypes)}")


@instruction
def max8(dst, src, name=None) -> None:
    """The 8 largest values of each partition, descending."""
    _check_search(src, "src")
    _check_eight("dst", dst, src.shape[0])
    values = read_float32(src, "src")
    write_float32(dst, -np.sort(-values, axis=1)[:, :8])
    record("vector", vector_cycles(src, src), reads=[src], writes=[dst])


def _occurrences(data: np.ndarray, wanted: np.ndarray, columns: range) -> np.ndarray:
    """Position of each wanted value in its row, -1 if absent; repeated ones at successive places, in the order ``columns``."""
    found = np.full(wanted.shape, -1, np.int64)
    for row in range(data.shape[0]):
        taken: set[int] = set()
        for column in columns:
            for position in np.flatnonzero(data[row] == wanted[row, column]):
                if int(position) not in taken:
                    taken.add(int(position))
                    found[row, column] = position
                    break
    return found


def _indices(found: np.ndarray, dtype: str) -> np.ndarray:
    """As dst stores them: all ones where a value was not found."""
    return np.where(found < 0, np.iinfo(NUMPY[dtype]).max, found).astype(NUMPY[dtype])


@instruction
def nc_find_index8(dst, data, vals, name=None) -> None:
    """Positions of 8 values in each partition; repeated values at successive occurrences, absent ones all ones."""
    _check_search(data, "data")
    _check_eight("vals", vals, data.shape[0])
    _check_eight("dst", dst, data.shape[0], ("uint16", "uint32"))
    found = _occurrences(read_float32(data, "data"), read_float32(vals, "vals"), range(8))
    write(dst, _indices(found, dst.dtype))
    record("vector", vector_cycles(data, data), reads=[data, vals], writes=[dst])


@instruction
def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None) -> None:
    """dst = data with the first occurrence of each value replaced by imm; values are matched in reverse order."""
    _check_search(data, "data")
    tile("dst", dst)
    _check_eight("vals", vals, data.shape[0])
    if (dst.shape[0], dst.free) != (data.shape[0], data.free):
        fail("shape", "dst", f"{dst!r} against data {data!r}")
    values = read_float32(data, "data").copy()
    found = _occurrences(values, read_float32(vals, "vals"), range(7, -1, -1))
    for row, positions in enumerate(found):
        values[row, positions[positions >= 0]] = imm
    write_float32(dst, values)
    if dst_idx is not None:
        _check_eight("dst_idx", dst_idx, data.shape[0], ("uint16", "uint32"))
        write(dst_idx, _indices(found, dst_idx.dtype))
    writes = [dst] if dst_idx is None else [dst, dst_idx]
    record("vector", vector_cycles(data, data), reads=[data, vals], writes=writes)
