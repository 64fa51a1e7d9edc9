# SPDX-License-Identifier: Apache-2.0
"""Compressed groups, their selection, and how the indexer learns it (docs/model.md, sections 5 and 6).

A selection has no gradient. The indexer learns from the attention that it serves: its scores, as a distribution over all
visible groups, should be the layer's attention over them, summed over heads. That costs a second set of scores, so only
every INDEX_STRIDE-th query takes part.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.formats import qdq_fp4_e4m3, qdq_fp4_ue8m0
from modeling_deepseek_v41.rope import rotate
from modeling_deepseek_v41.topk import top_positions

from .quantise import straight_through
from .streams import FP32, norm
from .weights import Weights

INDEX_STRIDE = 8
"""Of the queries that the indexers learn from; the first of them already sees several groups."""


@dataclasses.dataclass
class Groups:
    """What attention layers hand on, and the indexers' loss."""

    quantises: bool
    """Whether caches, index keys and queries pass through their QDQ."""
    learns: bool
    """Whether the indexers' loss is wanted."""
    kv: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """[B, G, D], the nearest source's."""
    key: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """[B, G, index_head_dim], likewise."""
    ratio: int = 0
    chosen: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """[B, T, G] bool, the nearest index source's selection."""
    blocks: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """[B, T, blocks] bool, the candidate source's."""
    losses: list[Tensor] = dataclasses.field(default_factory=list)

    def compress(self, x: Tensor, w: Weights, name: str, ratio: int, config: ModelConfig, table: Tensor) -> None:
        """Makes the groups of a kv source from its input x [B, T, d]; an incomplete group at the end is left out."""
        cut = x.shape[1] // ratio * ratio
        latent = F.linear(x[:, :cut], w[f"{name}.compressor.wkv"])
        if ratio > 1:
            score = F.linear(x[:, :cut], w[f"{name}.compressor.wgate"]).unflatten(1, (-1, ratio)).softmax(2)
            latent = (latent.unflatten(1, (-1, ratio)) * score).sum(2)
        latent = norm(latent, w, f"{name}.compressor.norm", config)
        at_group = table[:, :cut:ratio]
        kv = rotate(latent, at_group, FP32)
        key = F.linear(latent.detach(), w[f"{name}.indexer.wk"])
        key = rotate(norm(key, w, f"{name}.indexer.k_norm", config), at_group, FP32)
        self.kv = straight_through(kv, qdq_fp4_e4m3) if self.quantises else kv
        self.key = straight_through(key, qdq_fp4_ue8m0) if self.quantises else key
        self.ratio = ratio


def select(
    x: Tensor, qr: Tensor, w: Weights, name: str, layer: int, config: ModelConfig, table: Tensor, groups: Groups
) -> None:
    """Puts the selection of the index source ``layer`` into ``groups``, at the candidate source also its blocks."""
    c = config
    with torch.no_grad():
        scores = _scores(x, qr, w, name, c, table, groups)
        visible = _visible(torch.arange(x.shape[1]), groups).expand(scores.shape)
        size = c.candidate_block_size
        if layer == c.candidate_source_layer_id:
            groups.blocks = _blocks(scores.masked_fill(~visible, -torch.inf), groups.ratio, c)
        elif c.masks_with_candidates(layer):
            visible = visible & groups.blocks.repeat_interleave(size, -1)[..., : scores.shape[-1]]
        best = top_positions(scores.masked_fill(~visible, -torch.inf), min(c.index_topk, scores.shape[-1]))
        groups.chosen = torch.zeros_like(visible).scatter(-1, best, True) & visible


def index_loss(
    x: Tensor, qr: Tensor, far: Tensor, w: Weights, name: str, config: ModelConfig, table: Tensor, groups: Groups
) -> None:
    """Adds to ``groups`` the cross-entropy of the indexer's scores against attention ``far`` [B, T, H, G] (scores)."""
    if not groups.learns:
        return
    rows = slice(2 * groups.ratio + INDEX_STRIDE // 2, None, INDEX_STRIDE)
    hidden = ~_visible(torch.arange(x.shape[1])[rows], groups)
    target = far[:, rows].detach().masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1).mean(2)
    scores = _scores(x[:, rows].detach(), qr[:, rows].detach(), w, name, config, table[:, rows], groups)
    log_share = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    groups.losses.append(-(target * log_share).sum(-1).mean())


def _scores(x: Tensor, qr: Tensor, w: Weights, name: str, c: ModelConfig, table: Tensor, groups: Groups) -> Tensor:
    """Index scores [B, T, G]."""
    query = F.linear(qr, w[f"{name}.indexer.wq_b"]).unflatten(-1, (c.index_n_heads, -1))
    query = rotate(query, table, FP32)
    query = straight_through(query, qdq_fp4_ue8m0) if groups.quantises else query
    weights = F.linear(x, w[f"{name}.indexer.weights_proj"]) * (c.index_head_dim * c.index_n_heads) ** -0.5
    dots = torch.matmul(query.flatten(1, 2), groups.key.mT).unflatten(1, query.shape[1:3]).relu()
    return torch.matmul(weights.unsqueeze(2), dots).squeeze(2)


def _visible(positions: Tensor, groups: Groups) -> Tensor:
    """Which groups are complete at ``positions`` [T]: bool [T, G]."""
    return torch.arange(groups.kv.shape[1]) < (positions.unsqueeze(1) + 1) // groups.ratio


def _blocks(scores: Tensor, ratio: int, c: ModelConfig) -> Tensor:
    """The best blocks of visible scores [B, T, G], each query's newest one among them: bool [B, T, blocks]."""
    size = c.candidate_block_size
    best = F.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    seen = (torch.arange(scores.shape[1]).unsqueeze(1) + 1) // ratio
    newest = (torch.arange(best.shape[-1]) == (seen - 1) // size) & (seen > 0)
    best = best.masked_fill(newest, torch.inf)
    chosen = top_positions(best, min(c.candidate_topk_blocks, best.shape[-1]))
    return torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True) & (best > -torch.inf)
