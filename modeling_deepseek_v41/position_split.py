# SPDX-License-Identifier: Apache-2.0
"""The indexer's work divided over an attention group by positions: every rank scores its own part, then the best are merged.

A rank has part of every tile of compressed positions rather than one stretch of them: the parts of a short text are equal
too, and how wide the matrix products are does not depend on how far a call reads.
"""

import torch
from torch import Tensor

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
        return self.own(keys[:, :, :count].index_select(0, slot)), torch.zeros_like(slot)

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

        ``maxima`` [n, own blocks]: the rank's highest scores of every ``block`` positions. One exchange.
        """
        size = self.group.size
        if size == 1:
            return best, maxima
        if maxima is None:
            gathered = self.group.gather(best)
        else:
            gathered, maxima = self.group.gathers(best, maxima)
            maxima = join_parts(maxima, GROUP_TILE // block, size)
        scores, where = gathered.unflatten(-1, (size, 2, -1)).transpose(1, 2).flatten(-2).unbind(1)
        order = where.argsort(-1)
        scores, where = scores.gather(-1, order), where.gather(-1, order)
        chosen = arithmetic.ops.top_ascending(scores, where < torch.inf, k)
        merged = where.gather(-1, chosen.clamp_min(0)).nan_to_num(posinf=0.0).long()
        return merged.masked_fill(chosen < 0, -1), maxima
