# SPDX-License-Identifier: Apache-2.0
"""Attention: one latent KV for all heads, a sliding window, selected groups and a sink (docs/model.md, section 4)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .compressor import Compressor
from .config import ModelConfig
from .indexer import Indexer
from .linear import Linear, RMSNorm, frozen
from .numerics import Arithmetic
from .parallel import ColumnParallelLinear, Parallel, RowParallelLinear, place_of
from .projections import Projected
from .rope import rotate
from .rows import PREFILL_TILE
from .state import Call, State, windows


class Selection(NamedTuple):
    """What index sources hand to the layers behind them."""

    topk_idxs: Tensor | None = None
    """[B, T, index_topk] int64: selected groups, ascending, -1 where fewer."""
    candidates: Tensor | None = None
    """[B, T, blocks] bool: the candidate source's blocks."""


class Rotary(NamedTuple):
    """Rotary tables [positions, 2, R] of the two families, and their rows [B, T, 2, R] at the call's positions."""

    plain: Tensor
    compressed: Tensor
    plain_rows: Tensor
    compressed_rows: Tensor


class Attention(nn.Module):
    """The attention sublayer of one layer; sources own a compressor and an indexer beside it.

    Heads, and with them the groups of the output projection, are split over the attention group; the rest is on every rank.
    """

    def __init__(self, config: ModelConfig, layer: int, arithmetic: Arithmetic, parallel: Parallel):
        super().__init__()
        c, group = config, parallel.attention
        self.ring, self.numerics, self.window = f"swa.{layer}", arithmetic, c.sliding_window
        self.heads, self.dim, self.groups = c.num_attention_heads // group.size, c.head_dim, c.o_groups // group.size
        self.ratio = c.compress_ratios[layer]
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, arithmetic)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps, arithmetic)
        self.wq_b = ColumnParallelLinear(c.q_lora_rank, c.num_attention_heads * self.dim, arithmetic, group)
        self.wkv = Linear(c.hidden_size, self.dim, arithmetic)
        self.kv_norm = RMSNorm(self.dim, c.rms_norm_eps, arithmetic)
        self.attn_sink = frozen(self.heads)
        heads_in, latent = self.heads * self.dim // self.groups, c.o_groups * c.o_lora_rank
        self.wo_a = ColumnParallelLinear(heads_in, latent, arithmetic, group)
        self.wo_b = RowParallelLinear(latent, c.hidden_size, arithmetic, parallel.o_proj)
        self.group_numbers, self.repeats = parallel.layout.group_numbers, parallel.o_proj.size // group.size
        self.source = c.kv_source(layer) if self.ratio else None
        self.compressor = Compressor(c, layer, arithmetic) if layer in c.kv_source_layer_ids else None
        self.indexer = Indexer(c, layer, arithmetic, parallel) if layer in c.index_source_layer_ids else None

    def forward(self, x: Tensor, rotary: Rotary, call: Call, state: State, selection: Selection) -> tuple[Tensor, Selection]:
        """x = attn_norm(collapse(streams)) [B, T, d] to the sublayer's output [B, T, d] and the selection to hand on."""
        numerics = self.numerics
        table = rotary.compressed_rows if self.ratio else rotary.plain_rows
        q, kv, of_qr, of_x = self.inputs(x, table)
        if self.compressor is not None and self.indexer is not None:
            latent, groups, complete = self.compressor(of_x[:-1], call, state)
            first = (groups * self.ratio).clamp_max(rotary.compressed.shape[0] - 1)
            at_group = rotary.compressed[first]
            self.compressor.publish(latent, groups, complete, at_group, state)
            self.indexer.publish(latent, groups, complete, at_group, state)
        if self.indexer is not None:
            selection = Selection(*self.indexer(of_qr[0], of_x[-1], table, selection.candidates, call, state))
        far = (state[f"ckv.{self.source}"], selection.topk_idxs) if self.ratio else None
        o = numerics.ops.attend(q, kv, self.ring, far, table, self.attn_sink, self.window, state, numerics)
        state.write_ring(self.ring, kv)
        return self.output(o, call.rank), selection

    def inputs(self, x: Tensor, table: Tensor) -> Projected:
        """x [B, T, d] and rotary rows to the rank's queries [B, T, h, D], not rotated, window KV as cached, what the indexer
        makes of the queries' latent, and what first the compressor and then the indexer make of x itself."""
        weights = self.wq_a.weight, self.q_norm.weight, self.wq_b.weight, self.wkv.weight, self.kv_norm.weight
        linears = [] if self.compressor is None else self.compressor.linears
        of_qr = []
        if self.indexer is not None:
            linears, of_qr = [*linears, self.indexer.weights_proj], [self.indexer.wq_b.weight]
        of_x = [(linear.weight, linear.rounds) for linear in linears]
        found = self.numerics.ops.query_projection(x, table, *weights, self.q_norm.eps, self.numerics, of_qr, of_x)
        return found._replace(q=found.q.unflatten(-1, (self.heads, self.dim)))

    def window_kv(self, kv: Tensor, table: Tensor) -> Tensor:
        """wkv's result [B, T, D] and rotary rows [B, T, 2, R] to the window KV [B, T, D] as it is cached."""
        return self.numerics.rotated_window_kv(self.kv_norm(kv), table)

    def output(self, o: Tensor, rank: Tensor) -> Tensor:
        """The rank's heads' values [B, T, h, D] through the grouped projection and wo_b: [B, T, d], the same on every rank."""
        part = (self.repeats, place_of(self.group_numbers, rank)) if self.repeats > 1 else None
        weights, rounds = (self.wo_a.weight, self.wo_b.weight), self.wo_b.rounds
        return self.wo_b.added_up(self.numerics.ops.output_projection(o, *weights, self.groups, part, rounds, self.numerics))


Far = tuple[Tensor, Tensor]
"""Compressed KV [slots, G, D] and the selected groups [B, T, k], -1 for none."""


def attend(
    q: Tensor, kv: Tensor, ring: str, far: Far | None, table: Tensor, sink: Tensor, window: int, state: State,
    arithmetic: Arithmetic,
) -> Tensor:  # fmt: skip
    """Softmax attention of the call's queries over their window, the selected groups and a sink.

    q [B, T, H, D] before rotation, kv [B, T, D] the call's window KV as cached, ``ring`` the state that holds the KV of
    earlier positions, ``table`` [B, T, 2, R] the rotary rows, sink [H]. Returns [B, T, H, D], rotated back, rounded.
    Rows run in tiles: a row of decode is its own call, so its bits do not depend on its neighbours.
    """
    call, tokens = state.call, q.shape[1]
    stretch = windows(state.history(ring, window - 1), kv)
    turned = rotate(q, table, arithmetic)
    tile = 1 if tokens <= arithmetic.exact_tokens else PREFILL_TILE
    out = []
    for row in range(q.shape[0]):
        for first in range(0, tokens, tile):
            part = slice(first, min(first + tile, tokens))
            near = stretch[row, first : part.stop + window - 1].float()
            valid = _in_window(call.positions[row, part], window)
            gathered = None
            if far is not None:
                cache, chosen = far[0], far[1][row, part]
                index = chosen.clamp_min(0) + call.slot[row].clamp_min(0) * cache.shape[1]
                gathered = cache.flatten(0, 1)[index].masked_fill_((chosen < 0).unsqueeze(-1), 0).float()
                valid = torch.cat([valid, chosen >= 0], -1)
            out.append(softmax_attention(turned[row, part], near, gathered, valid, sink, arithmetic))
    return rotate(torch.cat(out).unflatten(0, q.shape[:2]), table, arithmetic, back=True)


def attend_block(
    q: Tensor, kv: Tensor, ring: str, table: Tensor, sink: Tensor, window: int, state: State, arithmetic: Arithmetic
) -> Tensor:
    """Attention of a draft block: every query sees the ``window`` positions before the call and all of the call's tokens.

    As ``attend``, without selected groups; ``ring`` is read and stays as it is (docs/model.md, section 9). Row by row.
    """
    tokens = q.shape[1]
    stretch = windows(state.history(ring, window), kv).float()
    valid = state.call.start[:, None] + torch.arange(-window, tokens, device=q.device) >= 0
    turned = rotate(q, table, arithmetic)
    out = [
        softmax_attention(turned[row, t : t + 1], stretch[row], None, valid[row : row + 1], sink, arithmetic)
        for row in range(q.shape[0])
        for t in range(tokens)
    ]
    return rotate(torch.cat(out).unflatten(0, q.shape[:2]), table, arithmetic, back=True)


def _in_window(positions: Tensor, window: int) -> Tensor:
    """Which rows of a tile's stretch each query sees: positions [n] to bool [n, n + window - 1]."""
    n = positions.shape[0]
    place = torch.arange(n + window - 1, device=positions.device)
    age = torch.arange(n, device=positions.device)[:, None] + window - 1 - place
    return (age >= 0) & (age < window) & (age <= positions[:, None])


def softmax_attention(
    q: Tensor, near: Tensor, far: Tensor | None, valid: Tensor, sink: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """q [n, H, D] over shared keys near [m, D] and own keys far [n, k, D], where valid [n, m + k]; keys are the values.

    The maximum is over valid keys without the sink; probabilities are rounded before they meet the values, the denominator
    is the fp32 sum before rounding plus exp(sink - max). A row without a valid key gives zeros. Returns [n, H, D], rounded.
    """
    n, heads, dim = q.shape
    s = torch.matmul(q.flatten(0, 1), near.T).view(n, heads, -1)
    if far is not None:
        s = torch.cat([s, torch.bmm(q, far.mT)], -1)
    hidden = torch.zeros(valid.shape, device=s.device).masked_fill_(~valid, -torch.inf)
    s = s.mul_(dim**-0.5).add_(hidden.unsqueeze(1))
    highest = s.amax(-1, keepdim=True).clamp_min_(-1e30)
    p = s.sub_(highest).exp_()
    total = p.sum(-1, keepdim=True) + (sink.unsqueeze(-1) - highest).exp_()
    p = arithmetic.round(p)
    o = torch.matmul(p[..., : near.shape[0]].flatten(0, 1), near).view(n, heads, dim)
    if far is not None:
        o = o + torch.bmm(p[..., near.shape[0] :], far)
    return arithmetic.round(o / total)
