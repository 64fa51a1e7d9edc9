# SPDX-License-Identifier: Apache-2.0
"""The indexer's work divided over an attention group by positions: every rank scores its own part, then the best are merged.

A rank has part of every tile of compressed positions rather than one stretch of them: the parts of a short text are equal
too, and how wide the matrix products are does not depend on how far a call reads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .numerics import Arithmetic
from .parallel import Group, join_parts, own_part, place_of
from .state import GROUP_TILE


class PositionSplit:
    """The part of ``rank`` [1] in ``group``. In a group of one it is everything, and nothing is copied."""

    def __init__(self, group: Group, rank: Tensor):
        self.group, self.tile = group, GROUP_TILE // group.size
        """``tile``: of every GROUP_TILE positions, how many are the rank's."""
        self._place = place_of(group.places, rank) if group.size > 1 else rank

    def own(self, x: Tensor, tile: int = GROUP_TILE) -> Tensor:
        """The rank's part of x [..., n], which has one entry per position, or ``tile`` entries per GROUP_TILE positions."""
        return x if self.group.size == 1 else own_part(x, tile, self.group.size, self._place)

    def keys(self, keys: Tensor, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Keys [slots, D, G] and a sequence's ``slot`` [1] to what the rank reads of the first ``count``, and their slot."""
        if self.group.size == 1:
            return keys, slot
        by_tile = keys[:, :, :count].unflatten(-1, (-1, self.group.size, self.tile))
        return by_tile[slot, :, :, self._place].flatten(-2), torch.zeros_like(slot)

    def best(self, chosen: Tensor, scores: Tensor, positions: Tensor) -> Tensor:
        """A rank's ``chosen`` [n, k] of ``scores`` and ``positions`` [n, own], -1 for none, in the form that ``merge`` takes.

        In a group of one ``chosen`` itself; else [n, 2 * min(k, own)] fp32, scores and positions, which are exact below 2^24.
        """
        if self.group.size == 1:
            return chosen
        chosen = chosen[:, : positions.shape[0]]
        none, index = chosen < 0, chosen.clamp_min(0)
        where = positions.float()[index].masked_fill(none, torch.inf)
        return torch.cat([scores.gather(-1, index).masked_fill(none, -torch.inf), where], -1)

    def merge(
        self, best: Tensor, maxima: Tensor | None, block: int, k: int, arithmetic: Arithmetic
    ) -> tuple[Tensor, Tensor | None]:
        """The group's k best of what ``best`` gave, ascending, -1 where fewer: [n, k] int64; and the ``maxima`` of all blocks.

        ``maxima`` [n, own blocks]: the rank's highest scores of every ``block`` positions. One exchange. Scores are compared in
        the arithmetic's dtype, which holds them.
        """
        size = self.group.size
        if size == 1:
            return best, maxima
        if maxima is None:
            gathered = self.group.gather(best)
        else:
            gathered, maxima = self.group.gathers(best, maxima)
            maxima = join_parts(maxima, GROUP_TILE // block, size).to(arithmetic.dtype)
        scores, where = by_position(*gathered.unflatten(-1, (size, 2, -1)).unbind(-2))
        chosen = arithmetic.ops.top_ascending(scores.to(arithmetic.dtype), where < torch.inf, k)
        merged = where.gather(-1, chosen.clamp_min(0)).nan_to_num(posinf=0.0).long()
        return merged.masked_fill(chosen < 0, -1), maxima


def by_position(scores: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Lists side by side [n, lists, length], each ascending in ``where``, as one [n, m]: the scores, and their positions.

    Unused entries, at infinity with the score -infinity, come last; lengths are filled up with them to a power of two, and
    the number of lists is one. A bitonic merge: pairwise minima and maxima in log2(m) rounds, since not every device sorts.
    """
    missing = (1 << (where.shape[-1] - 1).bit_length()) - where.shape[-1]
    scores, where = F.pad(scores, (0, missing), value=-torch.inf), F.pad(where, (0, missing), value=torch.inf)
    while where.shape[1] > 1:
        scores, where = (torch.cat([x[:, 0::2], x[:, 1::2].flip(-1)], -1) for x in (scores, where))
        step = where.shape[-1] // 2
        while step:
            scores, where = _exchanged(scores, where, step)
            step //= 2
    return scores.squeeze(1), where.squeeze(1)


def _exchanged(scores: Tensor, where: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Entries [..., m] in which the later one of every two that are ``step`` apart has the higher position."""
    pairs = [x.unflatten(-1, (-1, 2, step)).unbind(-2) for x in (scores, where)]
    swap = pairs[1][0] > pairs[1][1]
    scores, where = (torch.stack([torch.where(swap, b, a), torch.where(swap, a, b)], -2).flatten(-3) for a, b in pairs)
    return scores, where
