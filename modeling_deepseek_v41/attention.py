# SPDX-License-Identifier: Apache-2.0
"""Attention: one latent KV for all heads, a sliding window, selected compressed groups and a sink (docs/model.md, section 4)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .compressor import Compressor
from .config import ModelConfig
from .indexer import Indexer
from .linear import Linear, RMSNorm, frozen
from .numerics import Numerics
from .rope import rotate
from .rows import PREFILL_TILE, by_rows
from .state import Call, State, windows


class Selection(NamedTuple):
    """What index sources hand to the layers behind them."""

    topk_idxs: Tensor | None = None
    """[B, T, index_topk] int64: selected groups, ascending, -1 where fewer."""
    candidates: Tensor | None = None
    """[B, T, blocks] bool: the candidate source's blocks."""


class Rotary(NamedTuple):
    """Rotary tables [positions, 2, R/2] of the two families."""

    plain: Tensor
    compressed: Tensor


class Attention(nn.Module):
    """The attention sublayer of one layer; sources own a compressor and an indexer beside it."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics, exact_tokens: int):
        super().__init__()
        c = config
        self.layer, self.numerics, self.exact_tokens, self.window = layer, numerics, exact_tokens, c.sliding_window
        self.heads, self.dim, self.groups = c.num_attention_heads, c.head_dim, c.o_groups
        self.ratio = c.compress_ratios[layer]
        dtype = numerics.dtype
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, dtype, exact_tokens, fp8=True)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(c.q_lora_rank, self.heads * self.dim, dtype, exact_tokens, fp8=True)
        self.wkv = Linear(c.hidden_size, self.dim, dtype, exact_tokens, fp8=True)
        self.kv_norm = RMSNorm(self.dim, c.rms_norm_eps)
        self.attn_sink = frozen(self.heads)
        self.wo_a = Linear(self.heads * self.dim // self.groups, self.groups * c.o_lora_rank, dtype, exact_tokens, fp8=True)
        self.wo_b = Linear(self.groups * c.o_lora_rank, c.hidden_size, dtype, exact_tokens, fp8=True)
        self.source = c.kv_source(layer) if self.ratio else None
        self.compressor = Compressor(c, layer, numerics, exact_tokens) if layer in c.kv_source_layer_ids else None
        self.indexer = Indexer(c, layer, numerics, exact_tokens) if layer in c.index_source_layer_ids else None

    def forward(self, x: Tensor, rotary: Rotary, call: Call, state: State, selection: Selection) -> tuple[Tensor, Selection]:
        """x = attn_norm(collapse(streams)) [B, T, d] to the sublayer's output [B, T, d] and the selection to hand on."""
        family = rotary.compressed if self.ratio else rotary.plain
        table = family[call.positions]
        quantised = self.numerics.activation(x)
        qr = self.numerics.activation(self.q_norm(self.wq_a(quantised)))
        q = rotate(self.wq_b(qr).unflatten(-1, (self.heads, self.dim)), table)
        kv = self.numerics.window_kv(rotate(self.kv_norm(self.wkv(quantised)), table))
        if self.compressor is not None:
            latent, groups, complete = self.compressor(x, call, state)
            at_group = family[(groups * self.ratio).clamp_max(family.shape[0] - 1)]
            self.compressor.publish(latent, groups, complete, at_group, call, state)
            assert self.indexer is not None
            self.indexer.publish(latent, groups, complete, at_group, call, state)
        if self.indexer is not None:
            selection = Selection(*self.indexer(x, qr, table, selection.candidates, call, state))
        stretch = windows(state.history(f"swa.{self.layer}", call, self.window - 1), kv)
        state.write_ring(f"swa.{self.layer}", kv, call)
        o = self._attend(q, stretch, call, state, selection.topk_idxs if self.ratio else None)
        return self._project(rotate(o, table, back=True)), selection

    def _project(self, o: Tensor) -> Tensor:
        """o [B, T, H, D] through the grouped wo_a (no QDQ, result rounded) and wo_b."""
        grouped = o.float().unflatten(2, (self.groups, -1)).flatten(-2)
        weight = self.wo_a.weight.unflatten(0, (self.groups, -1)).mT

        def project(rows: Tensor) -> Tensor:
            return torch.bmm(rows.flatten(0, 1).transpose(0, 1), weight).transpose(0, 1).unflatten(0, rows.shape[:2])

        low = by_rows(project, self.exact_tokens, grouped).to(self.numerics.dtype)
        return self.wo_b(self.numerics.activation(low.flatten(-2)))

    def _attend(self, q: Tensor, stretch: Tensor, call: Call, state: State, topk_idxs: Tensor | None) -> Tensor:
        """Tiles of rows: a row of decode is its own call, so its bits do not depend on its neighbours."""
        tokens = q.shape[1]
        tile = 1 if tokens <= self.exact_tokens else PREFILL_TILE
        out = []
        for row in range(q.shape[0]):
            for first in range(0, tokens, tile):
                part = slice(first, min(first + tile, tokens))
                near = stretch[row, first : part.stop + self.window - 1].float()
                near_positions = call.start[row] + torch.arange(first - self.window + 1, part.stop, device=q.device)
                age = call.positions[row, part, None] - near_positions
                seen = (age >= 0) & (age < self.window) & (near_positions >= 0)
                if topk_idxs is None:
                    far, chosen = None, None
                else:
                    chosen = topk_idxs[row, part] >= 0
                    cache = state[f"ckv.{self.source}"]
                    index = topk_idxs[row, part].clamp_min(0) + call.slot[row].clamp_min(0) * cache.shape[1]
                    far = cache.flatten(0, 1)[index].masked_fill_(~chosen.unsqueeze(-1), 0).float()
                out.append(
                    sparse_attention(q[row, part].float(), near, seen, far, chosen, self.attn_sink, self.numerics.dtype)
                )
        return torch.cat(out).unflatten(0, q.shape[:2])


def sparse_attention(
    q: Tensor, near: Tensor, seen: Tensor, far: Tensor | None, chosen: Tensor | None, sink: Tensor, dtype: torch.dtype
) -> Tensor:
    """Softmax attention of q [n, H, D] over shared keys ``near`` [m, D] where ``seen`` [n, m], own keys ``far`` [n, k, D]
    where ``chosen`` [n, k], and a sink [H] that takes weight but adds nothing. Keys are the values. Returns [n, H, D] in ``dtype``.

    The maximum is over valid keys without the sink; probabilities are rounded to ``dtype`` before they meet the values,
    the denominator is fp32. A row without a valid key gives zeros.
    """
    n, heads, dim = q.shape
    s = torch.matmul(q.flatten(0, 1), near.T).view(n, heads, -1)
    valid = seen
    if far is not None and chosen is not None:
        s = torch.cat([s, torch.bmm(q, far.mT)], -1)
        valid = torch.cat([seen, chosen], -1)
    s = (s * dim**-0.5).masked_fill_(~valid.unsqueeze(1), -torch.inf)
    highest = s.amax(-1, keepdim=True).clamp_min_(-1e30)
    p = s.sub_(highest).exp_()
    total = p.sum(-1, keepdim=True).add_((sink.unsqueeze(-1) - highest).exp_())
    p = p.to(dtype).float()
    o = torch.matmul(p[..., : near.shape[0]].flatten(0, 1), near).view(n, heads, dim)
    if far is not None:
        o = o + torch.bmm(p[..., near.shape[0] :], far)
    return (o / total).to(dtype)
