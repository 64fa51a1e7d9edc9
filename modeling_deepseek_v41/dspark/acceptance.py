# SPDX-License-Identifier: Apache-2.0
"""Which drafts are kept, so that the text is the backbone's own (docs/model.md, section 9).

Verification row i holds the backbone's word on the token behind i accepted drafts. Rows are independent of each other,
shapes are static, nothing is read on the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling import draw, greedy


class Accepted(NamedTuple):
    """The new tokens of B rows: the accepted drafts and one of the backbone's own behind them."""

    tokens: Tensor
    """[B, k + 1] int64, -1 behind the last one."""
    counts: Tensor
    """[B] int64, how many there are."""


def accept_greedy(drafts: Tensor, logits: Tensor, length: Tensor) -> Accepted:
    """Keeps the longest prefix of ``drafts`` [B, k] that the greedy backbone would have chosen, and its next token.

    logits [B, k + 1, V] fp32; ``length`` [B]: verified rows that are real, which is also the most tokens that come out.
    """
    best = greedy(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
    return _leading(best, drafts == best[:, :-1], length)


def accept_sampled(
    drafts: Tensor, draft_probabilities: Tensor | None, probabilities: Tensor, uniforms: Tensor, length: Tensor
) -> Accepted:
    """Speculative sampling by rejection: the new tokens are distributed as if the backbone had drawn them one by one.

    drafts [B, k] were drawn from ``draft_probabilities`` q [B, k, V], or were chosen without chance (None: q is 1 at the
    draft); ``probabilities`` p [B, k + 1, V] are the backbone's under temperature, top-k and top-p; ``uniforms``
    [B, k + 1] in [0, 1), the last for the final draw; ``length`` [B] as in ``accept_greedy``. A draft x is kept with
    probability min(1, p(x) / q(x)); in place of the first one that is not, a token is drawn from max(p - q, 0); behind k
    kept drafts, one from the last row of p. A row of temperature 0 has a one-hot p: it is accepted greedily.
    """
    k = drafts.shape[1]
    target = probabilities[:, :k]
    if draft_probabilities is None:
        q = torch.zeros_like(target).scatter(-1, drafts.unsqueeze(-1), 1.0)
    else:
        q = draft_probabilities
    chosen = drafts.unsqueeze(-1)
    p_draft, q_draft = (x.gather(-1, chosen).squeeze(-1).double() for x in (target, q))
    kept = uniforms[:, :k].double() * q_draft < p_draft
    left = (target.double() - q.double()).clamp_min(0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, target.double())
    rest = torch.cat([left, probabilities[:, k:].double()], 1)
    accepted = _leading_ones(kept)
    own = draw(rest.gather(1, accepted.view(-1, 1, 1).expand(-1, 1, rest.shape[-1])).squeeze(1), uniforms[:, k])
    tokens = torch.cat([drafts, drafts[:, :1]], 1).scatter(1, accepted.unsqueeze(1), own.unsqueeze(1))
    return _leading(tokens, kept, length)


def _leading(tokens: Tensor, kept: Tensor, length: Tensor) -> Accepted:
    """tokens [B, k + 1] up to one behind the leading ``kept`` [B, k], at most ``length`` of them."""
    counts = torch.minimum(_leading_ones(kept) + 1, length)
    behind = torch.arange(tokens.shape[1], device=tokens.device) >= counts.unsqueeze(1)
    return Accepted(tokens.masked_fill(behind, -1), counts)


def _leading_ones(kept: Tensor) -> Tensor:
    """How many of ``kept`` [B, k] bool are True before the first False: [B] int64."""
    return ((~kept).long().cumsum(1) == 0).sum(1)
