# SPDX-License-Identifier: Apache-2.0
"""Top-k with one tie rule everywhere: higher score first, then lower position (docs/model.md, section 6)."""

import torch
from torch import Tensor


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Positions [..., k] int64 of the k highest scores [..., n], best first; equal scores by lower position.

    Score and position become one int64 key, so no two keys are equal and any top-k gives the same answer. -0.0 equals
    0.0. ``k`` may not exceed n.
    """
    bits = (scores.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    n = scores.shape[-1]
    keys = ordered.long() * n - torch.arange(n, device=scores.device)
    best = keys.topk(k, dim=-1).values
    return (-best).remainder(n)


def top_ascending(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The k best of the ``visible`` (bool [..., n]) scores, ascending by position, then -1 where fewer: [..., k]."""
    n = scores.shape[-1]
    best = top_positions(scores.masked_fill(~visible, -torch.inf), min(k, n))
    best = best.masked_fill(~visible.gather(-1, best), n).sort(-1).values
    best = best.masked_fill(best == n, -1)
    return best if n >= k else torch.nn.functional.pad(best, (0, k - n), value=-1)
