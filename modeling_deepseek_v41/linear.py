# SPDX-License-Identifier: Apache-2.0
"""Linear layers, the norm and the embedding, each reading its tensors from the checkpoint in the stored format."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint.rank import Source
from .errors import CheckpointError
from .formats import qdq_fp8
from .numerics import Arithmetic

SLICE_BYTES = 64 << 20
"""Stored bytes decoded at a time while loading."""


def frozen(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An uninitialised weight of inference: no gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def fill(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a loaded tensor, of the weight's shape and dtype, in the place of the weight ``name``.

    A weight on the meta device is replaced; one that has memory of its own gets the values.
    """
    expected = getattr(module, name)
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"{name}: expected {expected.dtype} {tuple(expected.shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
    if expected.is_meta:
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    else:
        expected.data.copy_(tensor)


def room(module: nn.Module, name: str) -> Tensor:
    """The memory of the weight ``name``, to be filled; made here where the weight is on the meta device."""
    weight = getattr(module, name)
    if weight.is_meta:
        fill(module, name, torch.empty(weight.shape, dtype=weight.dtype))
    return getattr(module, name).data


def quantise(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """formats.qdq_fp8 of x [..., k] fp32, whose values the arithmetic's dtype holds: an activation of the arithmetic's."""
    return qdq_fp8(x)


class Linear(nn.Module):
    """y = x W^T accumulated in fp32; W [n, k] is held in the arithmetic's weight_dtype, an exact decoding of what is stored.

    The caller of one whose weight is stored in fp8 passes the input through ``Arithmetic.activation`` first, once for all
    linears that share it. Other weights take the activation as it is. ``rounds``: whether the result is rounded to the
    arithmetic's dtype.
    """

    def __init__(self, k: int, n: int, arithmetic: Arithmetic, *, rounds: bool = True):
        super().__init__()
        self.weight = frozen(n, k, dtype=arithmetic.weight_dtype)
        self.arithmetic, self.rounds = arithmetic, rounds

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, k] fp32 to [B, T, n] fp32."""
        return self.arithmetic.ops.linear(x, self.weight, self.rounds, self.arithmetic)

    def load(self, checkpoint: Source, name: str) -> None:
        """Reads ``name``.weight, and ``name``.scale for fp8, a slice of rows at a time.

        Raises CheckpointError where a block scale is so small that bf16 would round the weights.
        """
        n, k = self.weight.shape
        step = max(32, SLICE_BYTES // (4 * k) // 32 * 32)
        weight = room(self, "weight")
        for row in range(0, n, step):
            stop = min(row + step, n)
            values = checkpoint.linear(name, row, stop)
            weight[row:stop] = values
            if weight.dtype != torch.float32 and not torch.equal(weight[row:stop].float(), values.float()):
                raise CheckpointError(
                    f"{name}.scale: rows {row} to {stop - 1} have scales so small that bf16 does not hold the weights exactly;"
                    " is the checkpoint damaged?"
                )


class Embedding(nn.Module):
    """A table of rows [rows, d] bf16 as stored."""

    def __init__(self, rows: int, d: int):
        super().__init__()
        self.weight = frozen(rows, d, dtype=torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] to [..., d] fp32."""
        return F.embedding(ids, self.weight).float()


class RMSNorm(nn.Module):
    """``rms_norm`` with a learned weight [d]."""

    def __init__(self, d: int, eps: float, arithmetic: Arithmetic):
        super().__init__()
        self.weight = frozen(d)
        self.eps, self.arithmetic = eps, arithmetic

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] fp32 to the same shape, rounded."""
        return self.arithmetic.ops.normalise(x, self.weight, self.eps, self.arithmetic)


def rms_norm(x: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension of fp32 ``x`` [B, T, d], rounded."""
    return arithmetic.round(x * rms_scale(x, eps) * weight)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last dimension of fp32 ``x``: [..., 1]."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), fp32. Unlike torch.sigmoid, its bits do not depend on an element's place in the tensor."""
    return x.neg().exp_().add_(1.0).reciprocal_()
