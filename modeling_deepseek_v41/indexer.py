# SPDX-License-Identifier: Apache-2.0
"""The indexer: scores of compressed groups, their top-k and the candidate blocks (docs/model.md, section 6)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .linear import Linear, RMSNorm
from .numerics import Arithmetic
from .parallel import Parallel
from .position_split import PositionSplit
from .rows import PREFILL_TILE
from .state import GROUP_TILE, Call, State, groups_read
from .topk import top_mask


class Indexer(nn.Module):
    """Selection of an index source layer. Keys exist at kv sources only; every source scores against its own source's keys."""

    def __init__(self, config: ModelConfig, layer: int, arithmetic: Arithmetic, parallel: Parallel):
        super().__init__()
        self.group = parallel.attention
        self.config, self.layer, self.numerics = config, layer, arithmetic
        self.source, self.ratio = config.kv_source(layer), config.compress_ratios[layer]
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.is_candidate_source = layer == config.candidate_source_layer_id
        self.uses_candidates = config.masks_with_candidates(layer)
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim, arithmetic)
        self.weights_proj = Linear(config.hidden_size, self.heads, arithmetic)
        if layer == self.source:
            self.wk = Linear(config.head_dim, self.dim, arithmetic)
            self.k_norm = RMSNorm(self.dim, config.rms_norm_eps, arithmetic)

    def publish(self, latent: Tensor, groups: Tensor, complete: Tensor, table: Tensor, state: State) -> None:
        """Writes the index keys of the groups that this call completes, made of the latent before its rotation."""
        key = self.numerics.rotated_index(self.k_norm(self.wk(latent)), table)
        state.write_groups(f"ikey.{self.source}", key, groups, complete)

    def scored(self, heads: Tensor, weights: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Results of wq_b [B, T, heads * dim] and weights_proj [B, T, heads] as they meet the keys, in the numerics' dtype:
        queries [B, T, heads, dim], rotated and quantised, and their scaled weights."""
        query = self.numerics.rotated_index(heads.unflatten(-1, (self.heads, self.dim)), table)
        return query, weights.to(self.numerics.dtype) * (self.dim**-0.5 * self.heads**-0.5)

    def forward(
        self, heads: Tensor, weights: Tensor, table: Tensor, candidates: Tensor | None, call: Call, state: State
    ) -> tuple[Tensor, Tensor | None]:
        """Results of wq_b [B, T, heads * dim] and weights_proj [B, T, heads] and rotary rows to the selection.

        Returns topk_idxs [B, T, index_topk] int64, ascending, -1 where fewer, and the candidate blocks [B, T, blocks] bool
        (new ones at the candidate source, else what came in).
        """
        query, weights = self.scored(heads, weights, table)
        numerics, (batch, tokens) = self.numerics, query.shape[:2]
        tile = numerics.ops.index_rows if tokens <= numerics.exact_tokens else PREFILL_TILE
        cache = state[f"ikey.{self.source}"]
        count = groups_read(call, self.ratio, cache.shape[2])
        split, size = PositionSplit(self.group, call.rank), self.config.candidate_block_size
        positions = split.own(torch.arange(count, device=query.device))
        chosen, maxima = [], []
        for row in range(batch):
            keys, slot = split.keys(cache, call.slot[row : row + 1].clamp_min(0), count)
            for first in range(0, tokens, tile):
                part = slice(first, first + tile)
                scores = numerics.ops.index_scores(
                    query[row, part], weights[row, part], keys, slot, positions.shape[0], numerics, split.tile
                )
                visible = positions < call.reach[row, part, None] // self.ratio
                if self.is_candidate_source:
                    maxima.append(_block_maxima(scores.masked_fill(~visible, -torch.inf), size))
                elif self.uses_candidates and candidates is not None:
                    allowed = split.own(candidates[row, part], GROUP_TILE // size)
                    visible = visible & allowed.repeat_interleave(size, -1)[..., : scores.shape[-1]]
                own = numerics.ops.top_ascending(scores, visible, self.config.index_topk)
                chosen.append(split.best(own, scores, positions))
        blocks = torch.cat(maxima) if maxima else None
        topk_idxs, blocks = split.merge(torch.cat(chosen), blocks, size, self.config.index_topk, numerics)
        shape = (batch, tokens)
        if blocks is not None:
            c, seen = self.config, call.reach.view(-1, 1) // self.ratio
            found = numerics.ops.candidate_blocks(blocks, seen, c.candidate_block_size, c.candidate_topk_blocks)
            candidates = found.unflatten(0, shape)
        return topk_idxs.unflatten(0, shape), candidates


def candidate_blocks(best: Tensor, seen: Tensor, size: int, most: int) -> Tensor:
    """Every row's ``most`` blocks with the highest of ``best`` [n, blocks], -inf for none: bool [n, blocks].

    ``seen`` [n, 1] int64: groups that the row sees; the newest one's block, of ``size`` groups each, is pinned.
    """
    blocks = torch.arange(best.shape[-1], device=best.device)
    best = best.masked_fill((blocks == (seen - 1) // size) & (seen > 0), torch.inf)
    return top_mask(best, min(most, best.shape[-1])) & (best > -torch.inf)


def _block_maxima(scores: Tensor, size: int) -> Tensor:
    """The highest of every ``size`` scores [n, groups]: [n, blocks]; the last block may be shorter."""
    padded = F.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf)
    return padded.unflatten(-1, (-1, size)).amax(-1)


def index_scores(
    query: Tensor, weights: Tensor, keys: Tensor, slot: Tensor, count: int, arithmetic: Arithmetic, tile: int = GROUP_TILE
) -> Tensor:
    """sum over heads of weight * relu(q . k): query [n, heads, D], weights [n, heads], keys [slots, D, G] to [n, count] fp32.

    ``slot`` [1] int64 says whose keys; the first ``count`` groups are scored, ``tile`` of them per matrix product.

    In release numerics every step is rounded to bf16, the sum over heads is accumulated in fp32.
    """
    flat = query.float().flatten(0, 1)
    scores = []
    for some in keys[:, :, :count].index_select(0, slot)[0].split(tile, -1):
        dots = torch.matmul(flat, some.float()).to(arithmetic.dtype).unflatten(0, query.shape[:2])
        scores.append((dots.relu_() * weights.unsqueeze(-1)).float().sum(1))
    return arithmetic.round(torch.cat(scores, -1))
