# SPDX-License-Identifier: Apache-2.0
"""Selections that differ only by a tie: the reference breaks ties arbitrarily (docs/model.md, section 6)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..indexer import Indexer
from ..state import Call, State


def index_scores(
    indexer: Indexer, heads: Tensor, weights: Tensor, table: Tensor, candidates: Tensor | None, call: Call, state: State
) -> tuple[Tensor, Tensor]:
    """Scores [T, groups] fp32 of the sequence in slot 0, in the numerics' rounding, and which groups may be chosen [T, groups].

    The arguments are those of the indexer's forward.
    """
    dtype = indexer.numerics.dtype
    query, scaled = indexer.scored(heads, weights, table)
    dots = torch.matmul(query[0].float(), state[f"ikey.{indexer.source}"][0].float()).to(dtype)
    scores = (dots.relu() * scaled[0].unsqueeze(-1)).float().sum(1).to(dtype).float()
    visible = torch.arange(scores.shape[-1]) < call.reach[0, :, None] // indexer.ratio
    if indexer.uses_candidates and candidates is not None:
        allowed = candidates[0].repeat_interleave(indexer.config.candidate_block_size, -1)[..., : scores.shape[-1]]
        allowed = F.pad(allowed, (0, scores.shape[-1] - allowed.shape[-1]))
        visible = visible & allowed
    return scores, visible


def tied_rows(found: Tensor, golden: Tensor, scores: Tensor) -> Tensor:
    """Rows [n] where two selections [n, m] bool differ and exchanging the differing members changes no score.

    ``scores`` [n, m] fp32, -inf where a member may not be chosen. Scores equal up to the dtype's last bit are no tie.
    """
    tied = torch.zeros(found.shape[0], dtype=torch.bool)
    for row in (found != golden).any(-1).nonzero().flatten().tolist():
        ours = scores[row, found[row] & ~golden[row]].sort().values
        theirs = scores[row, golden[row] & ~found[row]].sort().values
        tied[row] = ours.isfinite().all() and torch.equal(ours, theirs)
    return tied
