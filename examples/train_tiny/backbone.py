# SPDX-License-Identifier: Apache-2.0
"""The text model over whole sequences (docs/model.md, sections 2 and 8), differentiable, in fp32."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.engram.hashing import EngramLayout, engram_layouts, lookback, row_ids
from modeling_deepseek_v41.linear import rms_scale
from modeling_deepseek_v41.rope import rope_table

from .attention import attention
from .experts import experts
from .indexer import Groups
from .streams import collapse, expand, mixes, norm
from .weights import Weights


class Result(NamedTuple):
    """What a run of the backbone gives."""

    logits: Tensor
    """[B, T, vocab]."""
    taps: Tensor
    """[B, T, targets * d], what the drafter sees."""
    loads: dict[str, Tensor]
    """Tokens per expert [E] of every layer, by the name of its router's bias."""
    index_loss: Tensor
    """Mean over the index sources; 0 where it was not asked for."""


def run_backbone(
    ids: Tensor, w: Weights, config: ModelConfig, token_map: Tensor, quantises: bool = False, learns: bool = False
) -> Result:
    """ids [B, T] int64, whole sequences from position 0, through the weights ``w``.

    ``token_map`` [vocab]: the engram's compressed ids. ``quantises``: whether caches, index keys and queries pass through
    their QDQ, as in numerics fp32; without it this is fp32_no_qdq. ``learns``: whether the indexers' loss is wanted.
    """
    c = config
    plain, compressed = (tables(c, family, ids.shape[1]).unsqueeze(0) for family in (False, True))
    grams = _grams(ids, c, token_map) if c.engram_layer_ids else ids
    layouts = {layout.layer: layout for layout in _layouts(c)}
    x, pre = fresh_streams(F.embedding(ids, w["embed"]), c.hc_mult)
    groups, taps, loads = Groups(quantises, learns), [], {}
    for layer in range(c.num_hidden_layers):
        name = f"layers.{layer}"
        if layer in layouts:
            x = _engram(x, grams, w, f"{name}.engram", layouts[layer], c)
        if layer in c.dspark_target_layer_ids:
            taps.append(x.mean(2))
        table = compressed if c.compress_ratios[layer] else plain
        attend = functools.partial(attention, w=w, name=f"{name}.attn", layer=layer, config=c, table=table, groups=groups)
        x, pre, loads[f"{name}.ffn.gate.bias"] = block(x, pre, w, name, c, attend, is_drafter=False)
    logits = F.linear(norm(collapse(x, pre), w, "norm", c), w["head"])
    loss = torch.stack(groups.losses).mean() if groups.losses else torch.zeros(())
    return Result(logits, torch.cat(taps, -1) if taps else logits[..., :0], loads, loss)


def block(
    x: Tensor, pre: Tensor, w: Weights, name: str, config: ModelConfig, attend: Callable[[Tensor], Tensor], is_drafter: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One block: streams x [B, T, hc, d] and their ``pre`` to the next ones and the load of each expert."""
    attn_pre, mix = mixes(x, w, f"{name}.hc_attn", config)
    y = attend(norm(collapse(x, pre), w, f"{name}.attn_norm", config))
    x = expand(y, x, mix)
    ffn_pre, mix = mixes(x, w, f"{name}.hc_ffn", config)
    y, load = experts(norm(collapse(x, attn_pre), w, f"{name}.ffn_norm", config), w, f"{name}.ffn", config, is_drafter)
    return expand(y, x, mix), ffn_pre, load


def fresh_streams(h: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """h [B, T, d] on ``count`` equal streams, and the first mix, which reads stream 0."""
    pre = torch.zeros(*h.shape[:2], count)
    pre[..., 0] = 1.0
    return h.unsqueeze(2).repeat(1, 1, count, 1), pre


@functools.lru_cache(maxsize=8)
def tables(config: ModelConfig, compressed: bool, positions: int) -> Tensor:
    """Rotary rows [positions, 2, R]."""
    return rope_table(config, compressed, positions)


@functools.lru_cache(maxsize=8)
def _layouts(config: ModelConfig) -> tuple[EngramLayout, ...]:
    return engram_layouts(config)


def _grams(ids: Tensor, c: ModelConfig, token_map: Tensor) -> Tensor:
    """The newest compressed ids at every position: [B, T, n]."""
    n = c.engram_max_ngram_size
    tokens = F.pad(token_map[ids], (n - 1, 0))
    alive = F.pad(torch.ones_like(ids, dtype=torch.bool), (n - 1, 0))
    return lookback(tokens, alive, n, token_map[c.engram_pad_token_id])


def _engram(x: Tensor, grams: Tensor, w: Weights, name: str, layout: EngramLayout, c: ModelConfig) -> Tensor:
    """Streams x [B, T, hc, d] with the gated value of the looked-up n-grams added."""
    rows = F.embedding(row_ids(grams, layout), w[f"{name}.embed"]).flatten(-2)
    kv = F.linear(rows, w[f"{name}.wkv"]).unflatten(-1, (-1, c.hidden_size))
    key, value = kv[..., :-1, :], kv[..., -1:, :]
    dot = (x * (w[f"{name}.q_weight"] * w[f"{name}.k_weight"]) * key).sum(-1, keepdim=True)
    dot = dot * rms_scale(x, c.rms_norm_eps) * rms_scale(key, c.rms_norm_eps) * c.hidden_size**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
    return x + gate * value
