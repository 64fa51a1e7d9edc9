# SPDX-License-Identifier: Apache-2.0
"""Element by element: copies, constants, one or two tiles with ALU operators, reciprocal."""

from typing import Any

import numpy as np

from .. import costs
from ..access import copy_values, read_float32, read_rows, write, write_float32
from ..dtypes import INTEGERS, NUMPY, SIZE, from_float32
from ..enums import engine as engines
from ..machine import instruction, record
from ..memory import SBUF
from ..operands import alu, arithmetic, choose, no_psum, not_both_psum, same_shape, tensors, tile, vector, vector_cycles
from ..operators import Operator
from ..rules import fail
from ..tensor import NkiTensor

ANY_BUT_TENSOR = (engines.vector, engines.scalar, engines.gpsimd)


def engine_cycles(engine: engines, dst: NkiTensor, *sources: NkiTensor, two_inputs: bool = False) -> float:
    """Cycles of an elementwise instruction on the engine that runs it."""
    if engine is engines.vector:
        return vector_cycles(dst, *sources, two_inputs=two_inputs)
    return max(one.free for one in (dst, *sources)) * (costs.GPSIMD_TENSOR_TENSOR if two_inputs else 1)


@instruction
def tensor_copy(dst, src, engine=engines.unknown, name=None) -> None:
    """dst = src: the same bits for one dtype, else through fp32."""
    tile("dst", dst)
    tile("src", src)
    same_shape(dst, src=src)
    chosen = choose(engine, ANY_BUT_TENSOR, engines.vector)
    no_psum(chosen, dst=dst, src=src)
    write(dst, copy_values(dst, src, read_rows(src, "src")))
    record(chosen.name, engine_cycles(chosen, dst, src), reads=[src], writes=[dst])


@instruction
def memset(dst, value, engine=engines.unknown, name=None) -> None:
    """dst = value everywhere."""
    tile("dst", dst)
    chosen = choose(engine, (engines.vector, engines.gpsimd), engines.vector)
    no_psum(chosen, dst=dst)
    if not isinstance(value, int | float | np.integer | np.floating):
        fail("argument", "value", type(value).__name__)
    exact = dst.dtype in INTEGERS and isinstance(value, int | np.integer)
    filled = np.full(dst.shape, value, np.int64 if exact else np.float32)
    if exact and not np.iinfo(NUMPY[dst.dtype]).min <= value <= np.iinfo(NUMPY[dst.dtype]).max:
        fail("argument", "value", f"{value} for {dst.dtype}")
    write(dst, filled.astype(NUMPY[dst.dtype]) if exact else from_float32(filled, dst.dtype))
    record(chosen.name, engine_cycles(chosen, dst), writes=[dst])


@instruction
def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None) -> None:
    """dst = src where the predicate is not 0 (or is, with reverse_pred); elsewhere dst stays."""
    tile("dst", dst)
    tile("predicate", predicate)
    same_shape(dst, predicate=predicate)
    if predicate.dtype not in ("uint8", "uint16", "uint32"):
        fail("dtype-operand", "predicate", f"{predicate!r}, expected uint8, uint16 or uint32")
    chosen = (read_rows(predicate, "predicate") != 0) ^ bool(reverse_pred)
    if isinstance(src, NkiTensor):
        tile("src", src)
        same_shape(dst, src=src)
        not_both_psum(src=src, predicate=predicate)
        if src.dtype != dst.dtype:
            fail("dtype-operand", "src", f"{src!r}, expected {dst.dtype}")
        values = read_rows(src, "src")
    else:
        values = from_float32(np.full((dst.shape[0], dst.free), vector("src", src, dst.shape[0]), np.float32), dst.dtype)
    write(dst, values, mask=chosen)
    record(
        "vector",
        vector_cycles(dst, predicate, *tensors(src), two_inputs=True),
        reads=[predicate, dst, *tensors(src)],
        writes=[dst],
    )


@instruction
def tensor_tensor(dst, data1, data2, op, engine=engines.unknown, name=None) -> None:
    """dst = data1 op data2. fp32 on VectorE; GpSimd computes 32-bit integers exactly and runs nl.power."""
    tile("dst", dst)
    tile("data1", data1)
    tile("data2", data2)
    same_shape(dst, data1=data1, data2=data2)
    not_both_psum(data1=data1, data2=data2)
    operator = alu("op", op)
    if operator.unary:
        fail("operator", "op", repr(op))
    in_sbuf = all(one.buffer is SBUF for one in (dst, data1, data2))
    integers = all(one.dtype in ("int32", "uint32") for one in (dst, data1, data2))
    exact = integers and in_sbuf and not operator.bitwise
    power = operator.name == "power"
    chosen = choose(engine, (engines.vector, engines.gpsimd), engines.gpsimd if power or exact else engines.vector)
    if power and chosen is not engines.gpsimd:
        fail("engine", "engine", "nl.power runs on GpSimd")
    no_psum(chosen, dst=dst, data1=data1, data2=data2)
    if operator.bitwise:
        _check_bitvec(dst, data1=data1, data2=data2)
        left = read_rows(data1, "data1")
        write(dst, _bits(operator, left, read_rows(data2, "data2"), dst.dtype))
    elif integers and chosen is engines.gpsimd:
        left, right = (read_rows(one, label).astype(np.int64) for label, one in (("data1", data1), ("data2", data2)))
        result = operator.function(left, right)
        write(dst, result.astype(np.int64).astype(NUMPY[dst.dtype]))
    else:
        with np.errstate(all="ignore"):
            write_float32(dst, operator.function(read_float32(data1, "data1"), read_float32(data2, "data2")))
    record(chosen.name, engine_cycles(chosen, dst, data1, data2, two_inputs=True), reads=[data1, data2], writes=[dst])


@instruction
def tensor_scalar(
    dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=engines.unknown, name=None
) -> None:
    """dst = (data op0 operand0) op1 operand1, with scalars or [partitions, 1] tiles as operands."""
    tile("dst", dst)
    tile("data", data)
    same_shape(dst, data=data)
    first, second = alu("op0", op0), None if op1 is None else alu("op1", op1)
    if op1 is None and operand1 is not None:
        fail("argument", "operand1", "without op1")
    if second is not None and first.bitwise != second.bitwise:
        fail("bitvec", "op1", f"{first!r} with {second!r}")
    rsqrt = "rsqrt" in (first.name, second.name if second else "")
    chosen = choose(engine, ANY_BUT_TENSOR, engines.gpsimd if rsqrt else engines.vector)
    _check_tensor_scalar_engine(chosen, first, second, rsqrt)
    no_psum(chosen, dst=dst, data=data, operand0=operand0, operand1=operand1)
    if first.bitwise:
        _check_bitvec(dst, data=data)
        values = _apply_bits(read_rows(data, "data"), first, operand0, reverse0, "operand0", dst)
        if second is not None:
            values = _apply_bits(values, second, operand1, reverse1, "operand1", dst)
        write(dst, values.astype(NUMPY[dst.dtype]))
    else:
        values = apply(read_float32(data, "data"), first, operand0, reverse0, "operand0")
        if second is not None:
            values = apply(values, second, operand1, reverse1, "operand1")
        write_float32(dst, values)
    cycles = engine_cycles(chosen, dst, data) * (costs.RSQRT_GPSIMD if rsqrt else 1)
    record(chosen.name, cycles, reads=[data, *tensors(operand0, operand1)], writes=[dst])


def _check_tensor_scalar_engine(chosen: engines, first: Operator, second: Operator | None, rsqrt: bool) -> None:
    names = (first.name, second.name if second else None)
    if chosen is engines.scalar and names not in (("multiply", "add"), ("multiply", None), ("add", None)):
        fail("engine", "engine", f"scalar with {names}; it has (multiply, add), (multiply) and (add)")
    if first.bitwise and chosen is not engines.vector:
        fail("engine", "engine", f"{chosen.name}: bit operators run on the vector engine")
    if (chosen is engines.gpsimd) != rsqrt:
        fail("engine", "engine", f"{chosen.name} with {names}: GpSimd is for rsqrt, and rsqrt for GpSimd")
    if "power" in names:
        fail("engine", "op0, op1", "power is GpSimd's, by tensor_tensor")


def apply(values: np.ndarray, op: Operator, operand: Any, reverse: bool, label: str) -> np.ndarray:
    """One arithmetic step of a tensor-scalar instruction in fp32."""
    with np.errstate(all="ignore"):
        if op.unary:
            if isinstance(operand, NkiTensor) or operand not in (None, 0):
                fail("argument", label, f"{operand!r} for the unary {op!r}, expected None or 0")
            return op.function(values)
        other = vector(label, operand, values.shape[0])
        return op.function(other, values) if reverse else op.function(values, other)


def _apply_bits(values: np.ndarray, op: Operator, operand: Any, reverse: bool, label: str, dst: NkiTensor) -> np.ndarray:
    if op.unary:
        return op.function(values)
    if isinstance(operand, NkiTensor):
        tile(label, operand)
        if operand.dtype not in INTEGERS or operand.shape[0] != values.shape[0] or operand.free != 1:
            fail("vector-operand", label, f"{operand!r}, expected integers [{values.shape[0]}, 1]")
        other = read_rows(operand, label)
    elif isinstance(operand, int | np.integer):
        other = np.full((1, 1), operand, np.int64)
    else:
        fail("bitvec", label, f"{operand!r}, expected an integer")
    other = np.broadcast_to(other.astype(np.int64), values.shape)
    left, right = (other, values) if reverse else (values, other)
    return _bits(op, left.astype(values.dtype), right, dst.dtype)


def _bits(op: Operator, left: np.ndarray, right: np.ndarray, dtype: str) -> np.ndarray:
    unsigned = np.dtype(f"uint{8 * left.dtype.itemsize}")
    result = op.function(np.ascontiguousarray(left).view(unsigned), right.astype(np.int64).astype(unsigned))
    return result.astype(unsigned).view(NUMPY[dtype])


def _check_bitvec(dst: NkiTensor, **sources: NkiTensor) -> None:
    for label, one in {"dst": dst, **sources}.items():
        if one.dtype not in INTEGERS or SIZE[one.dtype] != SIZE[dst.dtype]:
            fail("bitvec", label, f"{one!r} with dst {dst!r}")


@instruction
def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None) -> None:
    """dst = (data op0 operand0) op1 operand1; operand0 a scalar or [partitions, 1], operand1 a tile."""
    tile("dst", dst)
    tile("data", data)
    tile("operand1", operand1)
    same_shape(dst, data=data, operand1=operand1)
    not_both_psum(data=data, operand1=operand1)
    values = apply(read_float32(data, "data"), arithmetic("op0", op0), operand0, reverse0, "operand0")
    other = read_float32(operand1, "operand1")
    last = arithmetic("op1", op1, unary=False)
    with np.errstate(all="ignore"):
        write_float32(dst, last.function(other, values) if reverse1 else last.function(values, other))
    cycles = vector_cycles(dst, data, operand1, two_inputs=True)
    record("vector", cycles, reads=[data, operand1, *tensors(operand0)], writes=[dst])


@instruction
def reciprocal(dst, data, name=None) -> None:
    """dst = 1 / data on VectorE."""
    tile("dst", dst)
    tile("data", data)
    same_shape(dst, data=data)
    with np.errstate(all="ignore"):
        write_float32(dst, np.float32(1) / read_float32(data, "data"))
    record("vector", costs.RECIPROCAL_VECTOR * data.free, reads=[data], writes=[dst])
