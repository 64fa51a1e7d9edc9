# SPDX-License-Identifier: Apache-2.0
"""Row independence: in decode and verification a row's bits do not depend on how many rows run beside it.

A matrix library may add up a row's products in another order when the number of rows changes. Calls of at most
``exact_tokens`` tokens per sequence (decode and verification) therefore run in tiles of a fixed number of rows; longer
calls (prefill) run as they are. The tile is the same everywhere, so plain decoding, batches and verification
of drafts give the same bits (docs/model.md, section 9).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from .numerics import Arithmetic

LINEAR_TILE = 3
"""Rows per matrix product in decode: three cost about as much as one, for the weight is read once."""

FEW_OUTPUTS = 8
"""Products with fewer outputs are added up output by output: a matrix library treats them as vectors, each row its own way."""

PREFILL_TILE = 64
"""Rows per call of a per-row function in prefill: bounds its temporary memory."""


def linear(x: Tensor, weight: Tensor, rounds: bool, arithmetic: "Arithmetic") -> Tensor:
    """x [B, T, k] fp32 times weight [n, k] fp32 or bf16, transposed: [B, T, n] fp32, rounded to the arithmetic's dtype where
    ``rounds``."""
    weight = weight.to(x.dtype)
    if x.shape[1] > arithmetic.exact_tokens:
        y = F.linear(x, weight)
    elif weight.shape[0] < FEW_OUTPUTS:
        y = (x.unsqueeze(-2) * weight).sum(-1)
    else:
        rows = x.flatten(0, 1)
        count = rows.shape[0]
        tiles = F.pad(rows, (0, 0, 0, -count % LINEAR_TILE)).split(LINEAR_TILE)
        y = torch.cat([F.linear(tile, weight) for tile in tiles])[:count].unflatten(0, x.shape[:2])
    return arithmetic.round(y) if rounds else y


def grouped(x: Tensor, weight: Tensor, arithmetic: "Arithmetic") -> Tensor:
    """x [B, T, G, k] times weight [G, n, k] fp32 or bf16, transposed, group by group: [B, T, G, n], rounded."""
    weight = weight.to(x.dtype)

    def product(rows: Tensor) -> Tensor:
        return torch.bmm(rows.flatten(0, 1).transpose(0, 1), weight.mT).transpose(0, 1).unflatten(0, rows.shape[:2])

    return arithmetic.round(by_rows(product, arithmetic.exact_tokens, x))


def by_rows(function: Callable[..., Tensor], exact_tokens: int, *tensors: Tensor) -> Tensor:
    """Applies ``function`` to tensors [B, T, ...], a row at a time where T <= exact_tokens, else all at once.

    ``function`` takes tensors [B', T', ...] and returns one tensor [B', T', ...]; a row at a time means B' = T' = 1.
    """
    batch, tokens = tensors[0].shape[:2]
    if tokens > exact_tokens or batch * tokens == 1:
        return function(*tensors)
    rows = zip(*(tensor.flatten(0, 1).split(1) for tensor in tensors), strict=True)
    return torch.cat([function(*(part.unsqueeze(0) for part in row)) for row in rows], 1).unflatten(1, (batch, tokens))[0]
