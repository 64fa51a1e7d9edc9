# SPDX-License-Identifier: Apache-2.0
"""NKI's dtypes (strings, as in nki.language) as NumPy dtypes, and casts as the engines do them."""

import ml_dtypes
import numpy as np

NUMPY = {
    name: np.dtype(kind)
    for name, kind in {
        "bool_": np.uint8,
        "int8": np.int8,
        "int16": np.int16,
        "int32": np.int32,
        "uint8": np.uint8,
        "uint16": np.uint16,
        "uint32": np.uint32,
        "float16": np.float16,
        "float32": np.float32,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3": ml_dtypes.float8_e4m3,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    }.items()
}
NAME = {kind: name for name, kind in NUMPY.items() if name != "bool_"} | {np.dtype(bool): "bool_"}
SIZE = {name: kind.itemsize for name, kind in NUMPY.items()}

INTEGERS = frozenset(name for name, kind in NUMPY.items() if kind.kind in "iu")
FP8 = frozenset({"float8_e4m3", "float8_e5m2"})
HALF = frozenset({"bfloat16", "float16"})
NOT_ON_TRN2 = frozenset({"float8_e4m3fn", "float8_e8m0fnu"})

_FP8_VALUES = {
    name: np.arange(256, dtype=np.uint8).view(NUMPY[name]).astype(np.float32) for name in NUMPY if name.startswith("float8")
}
_INTEGER_RANGE = {name: (np.iinfo(NUMPY[name]).min, np.iinfo(NUMPY[name]).max) for name in INTEGERS}


def to_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """The fp32 numbers that an engine computes with: exact, except for integers beyond 2^24."""
    if dtype == "float32":
        return values
    if dtype in _FP8_VALUES:
        return _FP8_VALUES[dtype][values.view(np.uint8)]
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 to any dtype: round to nearest even; integers saturate (release notes of NKI 0.6), NaN becomes 0 there."""
    if dtype == "float32":
        return values
    if dtype in INTEGERS:
        low, high = _INTEGER_RANGE[dtype]
        whole = np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=high, neginf=low))
        return np.clip(whole, low, high).astype(NUMPY[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(NUMPY[dtype])


def convert(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """A copy from one dtype to another: the same bits where they are equal, else through fp32."""
    return values if source == target else from_float32(to_float32(values, source), target)
