# SPDX-License-Identifier: Apache-2.0
"""Between torch and NumPy, and how near a kernel must come to its reference."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from modeling_deepseek_v41.kernels.dispatch import TORCH
from modeling_deepseek_v41.numerics import Arithmetic, numerics_by_name

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
CORES = pytest.mark.parametrize("cores", [1, 2])


def arithmetic(dtype: torch.dtype) -> Arithmetic:
    """The release's arithmetic in bf16, fp32 with the caches' QDQ else, on the PyTorch operations."""
    plain = numerics_by_name("release" if dtype == torch.bfloat16 else "fp32")
    return Arithmetic(plain.dtype, plain.quantize_activations, plain.quantize_cache, ops=TORCH, exact_tokens=6)


def array(tensor: Tensor) -> np.ndarray:
    """A contiguous NumPy array with the same bits; bf16 as ml_dtypes' bfloat16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def tensor(values: np.ndarray) -> Tensor:
    """The inverse of ``array``, a copy."""
    values = np.array(values)
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """fp32 from a standard normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: np.ndarray, expected: Tensor, dtype: torch.dtype, inner: float = 1e-5) -> None:
    """fp32 within 1e-5 of max|expected|; bf16 within one step (ulp) of the value, and nearly all of them equal.

    ``inner``, of max|expected|, is what an inner bf16 rounding that falls the other way may move, for values near zero.
    """
    result, scale = tensor(found).float(), expected.abs().max()
    assert result.shape == expected.shape and result.isfinite().all()
    error = (result - expected).abs()
    if dtype == torch.float32:
        assert error.max() <= 1e-5 * scale, f"{error.max() / scale:.3g} of the largest magnitude"
        return
    step = torch.ldexp(torch.ones_like(expected), expected.frexp().exponent - 8) + inner * scale
    assert (error <= step).all(), f"{(error / step).max():.3g} steps"
    differ = (error > 1e-6 * scale).float().mean()
    assert differ < 0.02, f"{differ:.3%} differ"
