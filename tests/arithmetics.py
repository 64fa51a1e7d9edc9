# SPDX-License-Identifier: Apache-2.0
"""The arithmetics that unit tests run modules and operations in."""

import importlib.util

import pytest

from modeling_deepseek_v41.kernels.dispatch import operations
from modeling_deepseek_v41.numerics import Arithmetic, numerics_by_name

EXACT_TOKENS = 6

KERNELS = pytest.mark.parametrize(
    "kernels",
    [
        "torch",
        pytest.param("numba", marks=pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not here")),
    ],
)


def arithmetic(numerics: str, kernels: str = "torch") -> Arithmetic:
    """``numerics`` on the operations ``kernels``; calls of up to EXACT_TOKENS tokens are decode or verification."""
    plain = numerics_by_name(numerics)
    return Arithmetic(
        dtype=plain.dtype,
        quantize_activations=plain.quantize_activations,
        quantize_cache=plain.quantize_cache,
        ops=operations(kernels),
        exact_tokens=EXACT_TOKENS,
    )
