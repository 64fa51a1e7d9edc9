# SPDX-License-Identifier: Apache-2.0
"""The operators of nki.language that instructions take as ``op``: ALU operators and activation functions, in fp32."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from .rules import fail


@dataclasses.dataclass(frozen=True, repr=False)
class Operator:
    """``alu``: VectorE and friends have it; ``activation``: ScalarE has it, for inputs in ``valid`` (of the absolute value).

    ``bitwise`` works on bit patterns, everything else on fp32.
    """

    name: str
    function: Callable[..., np.ndarray]
    alu: bool = False
    unary: bool = False
    bitwise: bool = False
    activation: bool = False
    valid: tuple[float, float] | None = None
    signed: bool = False

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __call__(self, *_: Any, **__: Any) -> Any:
        """In nki.language these are also functions that allocate; kernels here call nki.isa instead."""
        fail("unsupported", repr(self), "called as a function; use it as op= of an instruction of nki.isa")


def _flag(compare: Callable) -> Callable:
    return lambda a, b: compare(a, b).astype(np.float32)


def _logical(combine: Callable) -> Callable:
    return lambda a, b: combine(a != 0, b != 0).astype(np.float32)


def _shift_left(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    wide = a.astype(np.uint64) << np.minimum(b, 63).astype(np.uint64)
    return np.where(b < bits, wide, 0).astype(a.dtype)


def _shift_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    return np.where(b < bits, a.astype(np.uint64) >> np.minimum(b, 63).astype(np.uint64), 0).astype(a.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x))).astype(np.float32)


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return np.float32(1) / np.sqrt(x)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    return np.float32(1) / x


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "equal": _flag(np.equal),
    "not_equal": _flag(np.not_equal),
    "less": _flag(np.less),
    "less_equal": _flag(np.less_equal),
    "greater": _flag(np.greater),
    "greater_equal": _flag(np.greater_equal),
    "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or),
    "logical_xor": _logical(np.logical_xor),
}
BITWISE = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": _shift_left,
    "right_shift": _shift_right,
}
TRN3_ONLY = ("abs_max", "abs_min", "prelu", "bypass")

OPERATORS = {name: Operator(name, function, alu=True) for name, function in BINARY.items()}
OPERATORS |= {name: Operator(name, function, alu=True, bitwise=True) for name, function in BITWISE.items()}
OPERATORS |= {
    one.name: one
    for one in (
        Operator("invert", np.invert, alu=True, unary=True, bitwise=True),
        Operator("abs", np.abs, alu=True, unary=True, activation=True),
        Operator("rsqrt", _rsqrt, alu=True, unary=True, activation=True, valid=(2.0**-87, 2.0**97)),
        Operator("sqrt", np.sqrt, unary=True, activation=True, valid=(2.0**-116, 2.0**118)),
        Operator("log", np.log, unary=True, activation=True, valid=(2.0**-64, 2.0**64)),
        Operator("reciprocal", _reciprocal, unary=True, activation=True, valid=(2.0**-42, 2.0**42), signed=True),
        Operator("copy", lambda x: x, unary=True, activation=True),
        Operator("square", np.square, unary=True, activation=True),
        Operator("relu", lambda x: np.maximum(x, np.float32(0)), unary=True, activation=True),
        Operator("exp", np.exp, unary=True, activation=True),
        Operator("sigmoid", _sigmoid, unary=True, activation=True),
        Operator("silu", lambda x: x * _sigmoid(x), unary=True, activation=True),
        Operator("tanh", np.tanh, unary=True, activation=True),
        Operator("sign", np.sign, unary=True, activation=True),
        Operator("softplus", lambda x: np.logaddexp(x, np.float32(0)), unary=True, activation=True),
        Operator("gelu_apprx_sigmoid", lambda x: x * _sigmoid(np.float32(1.702) * x), unary=True, activation=True),
        Operator(
            "gelu_apprx_tanh",
            lambda x: np.float32(0.5) * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3))),
            unary=True,
            activation=True,
        ),
    )
}
"""What the kernels here need; NKI has more activation functions."""

_NAMES_ONLY = (
    "gelu",
    "gelu_dx",
    "silu_dx",
    "gelu_apprx_sigmoid_dx",
    "mish",
    "erf",
    "erf_dx",
    "sin",
    "cos",
    "arctan",
    "divide",
    "mod",
)


def _absent(name: str) -> Callable[..., np.ndarray]:
    return lambda *_: fail("unsupported", f"nl.{name}", "as op=")


OPERATORS |= {name: Operator(name, _absent(name)) for name in (*_NAMES_ONLY, *TRN3_ONLY)}
"""Present by name, since nki-library refers to them; no instruction accepts them."""

REDUCTIONS = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}
IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}
