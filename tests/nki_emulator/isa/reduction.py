# SPDX-License-Identifier: Apache-2.0
"""Reductions and scans over the elements of a partition, and the activation functions of ScalarE."""

from typing import Any

import numpy as np

from .. import costs
from ..access import read_float32, read_rows, write, write_float32
from ..dtypes import INTEGERS, NUMPY, SIZE
from ..enums import reduce_cmd as reduce_cmds
from ..machine import current, instruction, record
from ..operands import alu, arithmetic, not_both_psum, same_shape, tensors, tile, vector, vector_cycles
from ..operators import IDENTITY, OPERATORS, REDUCTIONS, Operator
from ..rules import fail
from .elementwise import apply


@instruction
def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None) -> None:
    """dst = reduction of data over its last axes; arithmetic in fp32, or bitwise."""
    tile("dst", dst)
    tile("data", data)
    axes = tuple(a % data.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    if not axes or 0 in axes or sorted(axes) != list(range(data.ndim - len(axes), data.ndim)):
        fail("argument", "axis", f"{axis} of {data!r}: the last free dimensions")
    kept = tuple(size for dim, size in enumerate(data.shape) if dim not in axes)
    if (dst.shape[0], dst.free) != (kept[0], int(np.prod(kept[1:]))):
        fail("shape", "dst", f"{dst!r}, expected {list(kept)}")
    operator = alu("op", op)
    if operator.bitwise:
        if (
            data.dtype not in INTEGERS
            or SIZE[data.dtype] != SIZE[dst.dtype]
            or operator.unary
            or "shift" in operator.name
            or negate
        ):
            fail("bitvec", "op", f"{operator!r} of {data!r} to {dst!r}")
        rows = read_rows(data, "data").reshape(*kept, -1)
        write(dst, getattr(np, operator.name).reduce(rows, axis=-1).view(NUMPY[dst.dtype]))
    else:
        if operator.name not in REDUCTIONS:
            fail("operator", "op", repr(op))
        values = read_float32(data, "data").reshape(*kept, -1)
        result = REDUCTIONS[operator.name].reduce(values, axis=-1, dtype=np.float32)
        write_float32(dst, -result if negate else result)
    record("vector", vector_cycles(data, data), reads=[data], writes=[dst])


@instruction
def activation(
    dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmds.idle, name=None
) -> None:
    """dst = op(data * scale + bias) on ScalarE, and a sum of dst over the free axis in the reduce registers."""
    _activate(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


@instruction
def activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None) -> None:
    """activation with reduce_cmd.reset_reduce."""
    _activate(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmds.reset_reduce)


def _activate(dst, op, data, bias, scale, reduce_op, reduce_res, command) -> None:
    tile("dst", dst)
    tile("data", data)
    same_shape(dst, data=data)
    if not isinstance(op, Operator) or not op.activation:
        fail("operator", "op", repr(op))
    partitions, core = dst.shape[0], current()
    with np.errstate(all="ignore"):
        inputs = read_float32(data, "data") * vector("scale", scale, partitions)
        if bias is not None:
            inputs = inputs + vector("bias", bias, partitions, dtypes=None)
        _check_range(op, inputs)
        values = op.function(inputs).astype(np.float32)
    if command is reduce_cmds.load_reduce:
        fail("argument", "reduce_cmd", "load_reduce is VectorE's")
    if command in (reduce_cmds.reset, reduce_cmds.reset_reduce):
        core.scalar_registers = np.zeros((128, 1), np.float32)
    if command in (reduce_cmds.reduce, reduce_cmds.reset_reduce):
        if reduce_op is None or reduce_op.name != "add":
            fail("operator", "reduce_op", f"{reduce_op!r}, expected nl.add")
        if core.scalar_registers is None:
            fail("reduce-registers", "reduce_cmd", "reduce before any reset")
        core.scalar_registers[:partitions] += values.sum(1, keepdims=True, dtype=np.float32)
    elif reduce_res is not None and command is reduce_cmds.idle and reduce_op is not None:
        fail("reduce-registers", "reduce_cmd", "idle does not accumulate; ask for reset_reduce")
    write_float32(dst, values)
    cycles = dst.free + (costs.READ_ACCUMULATOR if reduce_res is not None else 0)
    if reduce_res is not None:
        _write_registers(reduce_res, core.scalar_registers, partitions)
    index = record("scalar", cycles, reads=[data, *tensors(bias, scale)], writes=[dst, *tensors(reduce_res)],
                   after=[core.registers_after.get("scalar")])  # fmt: skip
    if command is not reduce_cmds.idle:
        core.registers_after["scalar"] = index


def _check_range(op: Operator, inputs: np.ndarray) -> None:
    if op.valid is None:
        return
    low, high = op.valid
    size = np.abs(inputs) if op.signed else inputs
    bad = ~((size >= low) & (size <= high))
    if bad.any():
        fail(
            "activation-range",
            "data",
            f"{op!r} of {inputs[bad][0]:.3g} and {bad.sum() - 1} more; valid are {low:.3g} to {high:.3g}",
        )


def _write_registers(reduce_res: Any, registers: np.ndarray | None, partitions: int, sign: float = 1.0) -> None:
    tile("reduce_res", reduce_res)
    if reduce_res.shape[0] != partitions or reduce_res.free != 1:
        fail("shape", "reduce_res", f"{reduce_res!r}, expected [{partitions}, 1]")
    if registers is None:
        fail("reduce-registers", "reduce_res", "read before any reset")
    write_float32(reduce_res, registers[:partitions] * np.float32(sign))


def _vector_reduce(values: np.ndarray, op: Operator, command, init: Any, reduce_res: Any, sign: float = 1.0) -> None:
    """Accumulate in VectorE's registers and write them out where asked."""
    core, partitions = current(), values.shape[0]
    if command is reduce_cmds.idle:
        core.vector_registers = None
        if reduce_res is not None:
            fail("reduce-registers", "reduce_cmd", "idle does not accumulate")
        return
    if command is reduce_cmds.reset_reduce:
        core.vector_registers = np.full((128, 1), IDENTITY[op.name], np.float32)
    elif command is reduce_cmds.load_reduce:
        if init is None:
            fail("argument", "reduce_init", "load_reduce needs a value")
        core.vector_registers = np.zeros((128, 1), np.float32)
        core.vector_registers[:partitions] = vector("reduce_init", init, partitions)
    elif command is not reduce_cmds.reduce:
        fail("argument", "reduce_cmd", command.name)
    elif core.vector_registers is None:
        fail("reduce-registers", "reduce_cmd", "reduce before any reset")
    function = REDUCTIONS[op.name]
    reduced = function.reduce(values, axis=1, keepdims=True, dtype=np.float32)
    core.vector_registers[:partitions] = function(core.vector_registers[:partitions], reduced)
    if reduce_res is not None:
        _write_registers(reduce_res, core.vector_registers, partitions, sign)


def _record_with_registers(cycles: float, reads: list, writes: list) -> None:
    core = current()
    index = record("vector", cycles, reads=reads, writes=writes, after=[core.registers_after.get("vector")])
    core.registers_after["vector"] = index


@instruction
def tensor_scalar_reduce(
    dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False, reduce_cmd=reduce_cmds.reset_reduce, reduce_init=None,
    reduce_res_negate=False, name=None,
) -> None:  # fmt: skip
    """dst = data op0 operand0, and its reduction over the free axis."""
    tile("dst", dst)
    tile("data", data)
    same_shape(dst, data=data)
    if reverse0:
        fail("argument", "reverse0", "not supported yet, says the documentation")
    values = apply(read_float32(data, "data"), arithmetic("op0", op0), operand0, False, "operand0")
    operator = arithmetic("reduce_op", reduce_op)
    if operator.name not in REDUCTIONS:
        fail("operator", "reduce_op", repr(reduce_op))
    write_float32(dst, values)
    _vector_reduce(values, operator, reduce_cmd, reduce_init, reduce_res, -1.0 if reduce_res_negate else 1.0)
    cycles = vector_cycles(dst, data) + (costs.READ_ACCUMULATOR if reduce_res is not None else 0)
    _record_with_registers(cycles, [data, *tensors(operand0, reduce_init)], [dst, *tensors(reduce_res)])


@instruction
def select_reduce(
    dst,
    predicate,
    on_true,
    on_false,
    reduce_res=None,
    reduce_cmd=reduce_cmds.idle,
    reduce_op=OPERATORS["maximum"],
    reverse_pred=False,
    name=None,
) -> None:
    """dst = on_true where the predicate is not 0, else on_false; and its maximum."""
    for label, one in (("dst", dst), ("predicate", predicate), ("on_true", on_true)):
        tile(label, one)
    same_shape(dst, predicate=predicate, on_true=on_true)
    not_both_psum(on_true=on_true, predicate=predicate)
    if predicate.dtype not in ("int8", "uint8", "int16", "uint16"):
        fail("dtype-operand", "predicate", f"{predicate!r}, expected an integer of 1 or 2 bytes")
    if on_true.dtype in ("int32", "uint32"):
        fail("dtype-operand", "on_true", repr(on_true))
    chosen = (read_rows(predicate, "predicate") != 0) ^ bool(reverse_pred)
    other = vector("on_false", on_false, dst.shape[0], dtypes=None)
    values = np.where(chosen, read_float32(on_true, "on_true"), other).astype(np.float32)
    write_float32(dst, values)
    _maximum(values, reduce_op, reduce_cmd, reduce_res)
    cycles = vector_cycles(dst, on_true, predicate, two_inputs=True)
    _record_with_registers(cycles, [predicate, on_true, *tensors(on_false)], [dst, *tensors(reduce_res)])


def _maximum(values: np.ndarray, reduce_op: Any, command, reduce_res: Any) -> None:
    if not isinstance(reduce_op, Operator) or reduce_op.name != "maximum":
        fail("operator", "reduce_op", f"{reduce_op!r}, expected nl.maximum")
    _vector_reduce(values, OPERATORS["maximum"], command, None, reduce_res)


@instruction
def tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None) -> None:
    """dst[:, i] = (data0[:, i] op0 dst[:, i-1]) op1 data1[:, i], starting from ``initial``."""
    for label, one in (("dst", dst), ("data0", data0), ("data1", data1)):
        tile(label, one)
    same_shape(dst, data0=data0, data1=data1)
    not_both_psum(data0=data0, data1=data1)
    first, second = arithmetic("op0", op0, unary=False).function, arithmetic("op1", op1, unary=False).function
    left, right = read_float32(data0, "data0"), read_float32(data1, "data1")
    state = np.broadcast_to(vector("initial", initial, dst.shape[0], dtypes=None), (dst.shape[0], 1))[:, 0]
    result = np.empty_like(left)
    with np.errstate(all="ignore"):
        for i in range(left.shape[1]):
            state = first(state, left[:, i]) if reverse0 else first(left[:, i], state)
            state = second(right[:, i], state) if reverse1 else second(state, right[:, i])
            result[:, i] = state
    write_float32(dst, result)
    cycles = vector_cycles(dst, data0, data1, two_inputs=True)
    record("vector", cycles, reads=[data0, data1, *tensors(initial)], writes=[dst])


@instruction
def tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None, reduce_cmd=reduce_cmds.reset_reduce, name=None) -> None:
    """dst[:, i] = op1(src[:, i] op0 imm0, dst[:, i-1]): a running sum, product, maximum or minimum."""
    tile("dst", dst)
    tile("src", src)
    same_shape(dst, src=src)
    for label, one in (("dst", dst), ("src", src)):
        if one.dtype in ("int32", "uint32"):
            fail("dtype-operand", label, f"{one!r}: not 32-bit integers")
    values = apply(read_float32(src, "src"), arithmetic("op0", op0), imm0, False, "imm0")
    operator = arithmetic("op1", op1, unary=False)
    if operator.name not in IDENTITY:
        fail("operator", "op1", repr(op1))
    core, partitions = current(), dst.shape[0]
    if reduce_cmd is reduce_cmds.reset_reduce:
        state = np.full(partitions, IDENTITY[operator.name], np.float32)
    elif reduce_cmd is reduce_cmds.load_reduce:
        state = np.broadcast_to(vector("imm1", imm1, partitions), (partitions, 1))[:, 0]
    elif reduce_cmd is reduce_cmds.reduce and core.vector_registers is not None:
        state = core.vector_registers[:partitions, 0]
    else:
        fail("reduce-registers", "reduce_cmd", f"{reduce_cmd.name} before any reset")
    result = np.empty_like(values)
    with np.errstate(all="ignore"):
        for i in range(values.shape[1]):
            state = operator.function(values[:, i], state).astype(np.float32)
            result[:, i] = state
    core.vector_registers = np.zeros((128, 1), np.float32)
    core.vector_registers[:partitions, 0] = state
    write_float32(dst, result)
    _record_with_registers(vector_cycles(dst, src), [src, *tensors(imm0, imm1)], [dst])
