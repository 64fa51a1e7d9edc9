# SPDX-License-Identifier: Apache-2.0
"""Top-k with one tie rule everywhere: higher score first, then lower position (docs/model.md, section 6).

Comparisons, sums and a top-k's values only, which any device has exactly; which of two equal scores a top-k or an unstable sort
takes differs between them, and some cannot sort.
"""

import torch
from torch import Tensor

FEW = 16
"""Up to so many positions are found one after another."""


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Positions [..., k] int64 of the k highest scores [..., n], best first; equal scores by lower position.

    -0.0 equals 0.0. ``k`` may not exceed n. More than ``FEW`` positions take a stable sort, which graphs should not need.
    """
    scores, n = scores.float(), scores.shape[-1]
    if k > FEW:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    positions, found = torch.arange(n, device=scores.device), []
    taken = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(k):
        highest = scores.masked_fill(taken, -torch.inf).amax(-1, keepdim=True)
        first = torch.where((scores == highest) & ~taken, positions, n - 1).amin(-1, keepdim=True)
        taken = taken | (positions == first)
        found.append(first)
    return torch.cat(found, -1) if found else positions.new_empty(*scores.shape[:-1], 0)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Which of the scores [..., n] are the k highest, as bool [..., n]; of equal ones the first. ``k`` may not exceed n."""
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(k, dim=-1).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    return above | (equal & (equal.long().cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def top_ascending(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The k best of the ``visible`` (bool [..., n]) scores, ascending by position, then -1 where fewer: [..., k]."""
    n = scores.shape[-1]
    chosen = top_mask(scores.masked_fill(~visible, -torch.inf), min(k, n)) & visible
    place = torch.where(chosen, chosen.long().cumsum(-1) - 1, k)
    positions = torch.arange(n, device=scores.device).expand(place.shape)
    empty = torch.full((*place.shape[:-1], k + 1), -1, dtype=torch.int64, device=scores.device)
    return empty.scatter(-1, place, positions)[..., :k]
