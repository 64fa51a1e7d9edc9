# SPDX-License-Identifier: Apache-2.0
"""Attention and the indexer as launches of NKI kernels."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import Far
from ..state import GROUP_TILE, State, windows
from .nki_launch import BANK, PARTITIONS, Launch

if TYPE_CHECKING:
    from ..numerics import Arithmetic

HIDDEN = -1e30
"""Added to the scores of window rows that a query does not see (kernels/nki/sparse_attention.py)."""


class AttentionKernels:
    """Queries arrive and leave unrotated: the kernel rotates them forth and back."""

    def __init__(self, launch: Launch):
        from .nki.candidate_blocks import candidate_blocks
        from .nki.index_scores import index_scores
        from .nki.sparse_attention import sparse_attention
        from .nki.top_k import top_k

        self._launch, self._sparse_attention, self._index_scores = launch, sparse_attention, index_scores
        self._top_k, self._candidate_blocks = top_k, candidate_blocks

    def attend(
        self, q: Tensor, kv: Tensor, ring: str, far: Far | None, table: Tensor, sink: Tensor, window: int, state: State,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """attention.attend: a kernel call per sequence and stretch of rows."""
        call, tokens, before = state.call, q.shape[1], window - 1
        queries = q.to(arithmetic.dtype)
        cache, slots = self._ring(ring, state, before)
        rows = min(PARTITIONS, BANK - before)
        stretch = windows(state.history(ring, before), kv).to(arithmetic.dtype) if tokens > rows else None
        out = []
        for row in range(q.shape[0]):
            for first in range(0, tokens, rows):
                part = slice(first, min(first + rows, tokens))
                near, near_idxs = cache, slots[row]
                if stretch is not None:
                    near, near_idxs = stretch[row], torch.arange(first, first + before, device=q.device)
                visible = _visible(call.positions[row, part], window)
                chosen = None if far is None else self._chosen(far, row, part, state)
                own = queries[row, part], table[row, part]
                out.append(self._attention(*own, near, near_idxs, kv[row, part], visible, sink, chosen))
        return torch.cat(out).unflatten(0, q.shape[:2]).float()

    def attend_block(
        self, q: Tensor, kv: Tensor, ring: str, table: Tensor, sink: Tensor, window: int, state: State,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """attention.attend_block: a kernel call per sequence."""
        tokens = q.shape[1]
        queries = q.to(arithmetic.dtype)
        cache, slots = self._ring(ring, state, window)
        reached = state.call.start[:, None] + torch.arange(-window, tokens, device=q.device) >= 0
        out = [
            self._attention(queries[row], table[row], cache, slots[row], kv[row], reached[row].expand(tokens, -1), sink, None)
            for row in range(q.shape[0])
        ]
        return torch.stack(out).float()

    def _ring(self, name: str, state: State, before: int) -> tuple[Tensor, Tensor]:
        """A ring's rows of all slots, and where the ``before`` positions ahead of the call are: [B, before], -1 for none."""
        ring = state[name]
        size = ring.shape[1] - 1
        positions = state.call.start[:, None] + torch.arange(-before, 0, device=ring.device)
        index = positions % size + state.slot * ring.shape[1]
        return ring.flatten(0, 1), index.masked_fill(positions < 0, -1)

    def _chosen(self, far: Far, row: int, part: slice, state: State) -> tuple[Tensor, Tensor]:
        """The compressed rows of all slots, and the selected ones [n, k] int32 of some queries in them, -1 for none."""
        cache, chosen = far[0], far[1][row, part]
        index = (chosen + state.slot[row] * cache.shape[1]).masked_fill(chosen < 0, -1).int()
        gathers = -(-index.shape[1] // PARTITIONS)
        return cache.flatten(0, 1), F.pad(index, (0, -index.shape[1] % gathers), value=-1)

    def _attention(
        self, q: Tensor, table: Tensor, near: Tensor, near_idxs: Tensor, kv: Tensor, visible: Tensor, sink: Tensor,
        chosen: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """Queries [n, H, D] with rotary rows [n, 2, R] over rows of ``near`` by index, rows kv [m, D] and chosen ones; visible
        [n, indices + m]."""
        bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, HIDDEN)
        window = near, near_idxs.int().unsqueeze(-1), kv.to(q.dtype), bias
        return self._launch(self._sparse_attention, q, *window, sink.unsqueeze(-1), table, *(chosen or ()))

    def index_scores(
        self, query: Tensor, weights: Tensor, keys: Tensor, slot: Tensor, count: int, arithmetic: "Arithmetic",
        tile: int = GROUP_TILE,
    ) -> Tensor:  # fmt: skip
        """indexer.index_scores: a kernel call per 128 rows. The kernel's tiles are its own."""
        dtype = arithmetic.dtype
        out = [
            self._launch(self._index_scores, q, w, keys, slot.int().unsqueeze(0), count=count)
            for q, w in zip(query.to(dtype).split(PARTITIONS), weights.to(dtype).split(PARTITIONS), strict=True)
        ]
        return torch.cat(out)

    def top_ascending(self, scores: Tensor, visible: Tensor, k: int) -> Tensor:
        """topk.top_ascending: one kernel call."""
        rows, seen = scores.flatten(0, -2), visible.expand_as(scores).flatten(0, -2)
        missing = -scores.shape[-1] % PARTITIONS
        rows, seen = F.pad(rows, (0, missing)), F.pad(seen, (0, missing)).to(torch.uint8)
        found = self._launch(self._top_k, rows, seen, k=k)
        return found.long().unflatten(0, scores.shape[:-1])

    def candidate_blocks(self, best: Tensor, seen: Tensor, size: int, most: int) -> Tensor:
        """indexer.candidate_blocks: one kernel call on the blocks' maxima, which ranks have exchanged by now."""
        missing = -best.shape[1] % PARTITIONS
        newest = torch.where(seen > 0, (seen - 1) // size, -1).float()
        visible = F.pad(best > -torch.inf, (0, missing)).to(torch.uint8)
        found = self._launch(self._candidate_blocks, F.pad(best, (0, missing)), visible, newest, size=1, most=most)
        return found[:, : best.shape[1]].bool()


def _visible(positions: Tensor, window: int) -> Tensor:
    """Which rows each of n consecutive positions sees of the ``window`` - 1 before the first and its own: bool [n, all]."""
    row = positions[0] + torch.arange(1 - window, positions.shape[0], device=positions.device)
    age = positions[:, None] - row
    return (age >= 0) & (age < window) & (row >= 0)
