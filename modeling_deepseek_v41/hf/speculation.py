# SPDX-License-Identifier: Apache-2.0
"""Logits ahead of the text: a drafter proposes, the backbone computes the logits behind all its drafts in one call.

The decoding loop asks token by token, as without speculation, and chooses as it always does. As long as it chooses what was
drafted the answer is there already; where it does not, the next block begins. So logits processors, stopping criteria,
streamers and sampling see exactly what they see without speculation: a token drawn from p that equals a draft chosen without
chance is that draft accepted with probability p, and any other one is a draw from the rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..buckets import read_length
from ..dspark.statistics import SpeculationStats
from ..dspark.step import draft_and_verify
from ..model import DeepseekV41Model
from ..runner import check_finite
from .advance import last_logits
from .cache import DeepseekV41Cache


class Block(NamedTuple):
    """A verified block of one row whose text had ``first`` tokens then."""

    first: int
    drafts: Tensor
    """[n] int64."""
    logits: Tensor
    """[n + 1, vocab] fp32, row i behind i drafts."""
    confidence: list[float]

    def agrees(self, ids: Tensor) -> int:
        """How many of the tokens ids [m] behind ``first`` are the drafts, from the first one on."""
        count = min(len(ids) - self.first, len(self.drafts))
        same = ids[self.first : self.first + count] == self.drafts[:count]
        return int(same.long().cumprod(0).sum())


class Lookahead:
    """The verified blocks of a batch's rows; ``stats`` counts what became of them. Greedy drafts."""

    def __init__(self, backbone: DeepseekV41Model, cache: DeepseekV41Cache, num_draft_tokens: int):
        self.stats = SpeculationStats(num_draft_tokens)
        self._backbone, self._cache = backbone, cache
        self._blocks: list[Block | None] = [None] * cache.batch_size

    def next_logits(self, rows: list[Tensor], running: list[bool], room: int) -> Tensor:
        """Logits [B, vocab] fp32 behind the tokens ``rows`` [n_b], zeros where a row is not ``running``.

        Asked for once per new token. ``room``: the most new tokens that are still wanted, which bounds what is verified.
        """
        lengths, missing = self._cache.lengths, []
        known: dict[int, Tensor] = {}
        for row, ids in enumerate(rows):
            if not running[row]:
                continue
            block = self._blocks[row]
            if block is not None and block.agrees(ids) == len(ids) - block.first:
                known[row] = block.logits[len(ids) - block.first]
                lengths[row] = len(ids)
            else:
                self._close(row, ids)
                missing.append(row)
        new = [row for row in missing if len(rows[row]) - lengths[row] > 1]
        drafting = [row for row in missing if row not in new]
        logits = last_logits(self._backbone, self._cache, rows, [row in new for row in range(len(rows))])
        if drafting:
            known |= self._verify(drafting, rows, room)
        for row, values in known.items():
            logits[row] = values
        return logits

    def close(self, rows: list[Tensor]) -> None:
        """Counts the blocks that the texts ``rows`` ended in."""
        for row, ids in enumerate(rows):
            self._close(row, ids)

    def _verify(self, drafting: list[int], rows: list[Tensor], room: int) -> dict[int, Tensor]:
        """The next block of the rows ``drafting``, whose state holds all but their newest token; logits behind that one."""
        cache, count, device = self._cache, self.stats.num_draft_tokens, rows[0].device
        start = [cache.lengths[row] for row in drafting]
        length = [min(count + 1, room, cache.max_seq_len - first) for first in start]
        assert self._backbone.drafter is not None
        drafts, logits, _ = draft_and_verify(
            self._backbone,
            self._backbone.drafter,
            torch.stack([rows[row][-1] for row in drafting]),
            torch.tensor(start, device=device),
            torch.tensor(length, device=device),
            torch.tensor(drafting, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
            cache.state,
            num_draft_tokens=count,
            read_len=read_length(max(map(sum, zip(start, length, strict=True))), cache.max_seq_len),
        )
        for place, (row, verified) in enumerate(zip(drafting, length, strict=True)):
            check_finite(logits[place, :verified])
            confidence = drafts.confidence[place, : verified - 1].tolist()
            block = Block(len(rows[row]), drafts.ids[place, : verified - 1], logits[place, :verified], confidence)
            self._blocks[row] = block
            cache.lengths[row] += 1
        return dict(zip(drafting, logits[:, 0], strict=True))

    def _close(self, row: int, ids: Tensor) -> None:
        """Counts the block of ``row``, whose text is now ids [n], and forgets it."""
        block = self._blocks[row]
        if block is not None and len(ids) > block.first:
            self.stats.record(block.confidence, block.agrees(ids) + 1, len(ids) - block.first)
        self._blocks[row] = None
