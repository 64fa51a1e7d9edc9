# SPDX-License-Identifier: Apache-2.0
"""The engram layer: table rows chosen by hashed n-grams, gated into every residual stream (docs/model.md, section 8)."""

import torch
from torch import Tensor, nn

from ..checkpoint.rank import Source
from ..config import ModelConfig
from ..formats import decode_fp8_rows
from ..linear import SLICE_BYTES, fill, frozen, rms_scale, sigmoid
from ..numerics import Arithmetic
from ..parallel import ColumnParallelLinear, Group, own_rows
from .hashing import EngramLayout, row_ids


class EngramTable(nn.Module):
    """The table's rows as stored (e4m3fn bytes, one ue8m0 scale per 32), left in the memory-mapped file; decoded on look-up.

    Rows are split over ``world``; those behind the table's end are zeros.
    """

    def __init__(self, rows: int, dim: int, world: Group):
        super().__init__()
        self.world, own = world, -(-rows // world.size)
        self.weight = frozen(own, dim, dtype=torch.uint8)
        self.scale = frozen(own, dim // 32, dtype=torch.uint8)

    def forward(self, rows: Tensor, rank: Tensor) -> Tensor:
        """What this rank [1] adds to the look-up of rows int64 [B, T, columns]: [B, T, columns * dim] fp32, exact in bf16.

        Rows of other ranks give zeros, so that the world's sum is the look-up.
        """
        if self.world.size == 1:
            return self._decoded(rows)
        index, here = own_rows(rows, rank, self.weight.shape[0])
        return (self._decoded(index).unflatten(-1, (*rows.shape[-1:], -1)) * here.unsqueeze(-1)).flatten(-2)

    def _decoded(self, rows: Tensor) -> Tensor:
        index = rows.flatten()
        return decode_fp8_rows(self.weight.index_select(0, index), self.scale.index_select(0, index)).view(*rows.shape[:2], -1)

    def load(self, checkpoint: Source, name: str) -> None:
        """Maps ``name``.weight and ``name``.scale, or reads them, a slice of rows at a time, where there is memory for them."""
        for key, parameter in list(self.named_parameters()):
            if parameter.is_meta:
                fill(self, key, checkpoint.mapped(f"{name}.{key}").view(torch.uint8))
                continue
            rows, step = parameter.shape[0], max(1, SLICE_BYTES * parameter.shape[0] // parameter.nbytes)
            for row in range(0, rows, step):
                stop = min(row + step, rows)
                parameter.data[row:stop] = checkpoint.rows(f"{name}.{key}", row, stop).view(torch.uint8)


class Engram(nn.Module):
    """One engram layer. ``look_up``, and ``wkv`` of it, follow from token ids alone; ``forward`` changes the streams."""

    def __init__(self, config: ModelConfig, layout: EngramLayout, arithmetic: Arithmetic, world: Group):
        super().__init__()
        hc, d = config.hc_mult, config.hidden_size
        self.layout, self.arithmetic, self.eps = layout, arithmetic, config.rms_norm_eps
        self.embed = EngramTable(layout.rows, config.engram_head_dim, world)
        width = config.engram_columns * config.engram_head_dim
        self.wkv = ColumnParallelLinear(width, (hc + 1) * d, arithmetic, world)
        self.q_weight = frozen(hc, d)
        self.k_weight = frozen(hc, d)

    def look_up(self, windows: Tensor, rank: Tensor) -> Tensor:
        """n-gram windows int [B, T, n] of compressed ids to this rank's share of their table rows, [B, T, columns * dim]."""
        return self.embed(row_ids(windows, self.layout), rank)

    def forward(self, x: Tensor, kv: Tensor) -> Tensor:
        """Streams x [B, T, hc, d] fp32 and the looked-up kv [B, T, hc + 1, d] to the streams with the gated value added."""
        key, value, weight = kv[..., :-1, :], kv[..., -1:, :], self.q_weight * self.k_weight
        return self.arithmetic.ops.engram_gate(x, key, value, weight, self.eps, self.arithmetic)


def engram_gate(x: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    """x + gate * value, rounded; gate = sigmoid of the signed root of x . (weight * key), both normalised, times d^-1/2.

    x and key [B, T, hc, d], value [B, T, 1, d], weight [hc, d], all fp32, to [B, T, hc, d] fp32.
    """
    dot = (x * weight * key).sum(-1, keepdim=True)
    dot = dot * rms_scale(x, eps) * rms_scale(key, eps) * x.shape[-1] ** -0.5
    gate = sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
    return arithmetic.round(torch.addcmul(x, gate, value))
