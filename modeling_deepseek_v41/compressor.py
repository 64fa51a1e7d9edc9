# SPDX-License-Identifier: Apache-2.0
"""The compressor of a kv source layer: one latent per group of r tokens (docs/model.md, section 5)."""

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .linear import Linear, RMSNorm
from .numerics import Arithmetic
from .state import Call, State, windows


class Compressor(nn.Module):
    """Latents of the groups that a call completes, before rotation: compressed KV and index keys are made of them."""

    def __init__(self, config: ModelConfig, layer: int, arithmetic: Arithmetic):
        super().__init__()
        self.layer, self.ratio, self.numerics = layer, config.compress_ratios[layer], arithmetic
        self.wkv = Linear(config.hidden_size, config.head_dim, arithmetic, rounds=self.ratio == 1)
        if self.ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, arithmetic, rounds=False)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, arithmetic)

    @property
    def linears(self) -> list[Linear]:
        """What takes the call's input: wkv and, for r above 1, wgate."""
        return [self.wkv, self.wgate] if self.ratio > 1 else [self.wkv]

    def forward(self, projected: list[Tensor], call: Call, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Results [B, T, D] of ``linears`` to latents [B, n, D], group numbers [B, n] and whether each completes in this call.

        n = ceil(T / r) is the most groups that T tokens can complete.
        """
        r, (batch, tokens, _), device = self.ratio, projected[0].shape, projected[0].device
        groups = call.start[:, None] // r + torch.arange(-(-tokens // r), device=device)
        last = groups * r + r - 1
        end = (call.start + call.length)[:, None]
        complete = (last >= call.start[:, None]) & (last < end)
        if r == 1:
            return self.norm(projected[0]), groups, complete
        raw = torch.stack(projected, 2)
        rows = windows(state.history(f"craw.{self.layer}", r - 1), raw)
        state.write_ring(f"craw.{self.layer}", raw)
        first = groups * r - call.start[:, None] + r - 1
        index = (first.unsqueeze(-1) + torch.arange(r, device=device)).clamp_max(rows.shape[1] - 1)
        kv, score = rows[torch.arange(batch, device=device)[:, None, None], index].unbind(3)
        latent = self.numerics.ops.compress_pool(kv, score, self.norm.weight, self.norm.eps, self.numerics)
        return latent, groups, complete

    def publish(self, latent: Tensor, groups: Tensor, complete: Tensor, table: Tensor, state: State) -> None:
        """Writes compressed KV: the latent rotated at its group's first position, then the fp4 QDQ."""
        kv = self.numerics.rotated_compressed_kv(latent, table)
        state.write_groups(f"ckv.{self.layer}", kv, groups, complete)


def compress_pool(kv: Tensor, score: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    """RMSNorm, with ``weight`` [D], of the sum over each group's rows of softmax(score) times kv, both rounded.

    kv and score [B, n, r, D] fp32 to [B, n, D] fp32; the softmax is over r, column by column.
    """
    pooled = (kv * score.softmax(2)).sum(2)
    return arithmetic.ops.normalise(arithmetic.round(pooled), weight, eps, arithmetic)
