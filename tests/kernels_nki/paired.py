# SPDX-License-Identifier: Apache-2.0
"""The PyTorch operations and the emulated ones, and how near their results must be."""

import dataclasses

import emulated
import torch
from comparing import arithmetic
from torch import Tensor

from modeling_deepseek_v41.kernels.dispatch import operations
from modeling_deepseek_v41.numerics import Arithmetic


def pair(dtype: torch.dtype) -> tuple[Arithmetic, Arithmetic]:
    """The PyTorch operations and the emulated ones."""
    plain = arithmetic(dtype)
    return plain, dataclasses.replace(plain, ops=operations(emulated.NAME))


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within 1e-5 of the largest magnitude, or a bf16 step."""
    assert found.shape == expected.shape
    scale = expected.abs().max()
    step = 1e-5 * scale
    if dtype != torch.float32:
        step = torch.ldexp(torch.ones_like(expected), expected.frexp().exponent - 8) + 2.0**-11 * scale
    assert ((found.float() - expected).abs() <= step).all()
