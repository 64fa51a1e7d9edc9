# SPDX-License-Identifier: Apache-2.0
"""Explicit state, addressed by absolute position (docs/model.md, section 10).

Rings keep the last rows of a sequence at slot = position mod ring length, with slack for rejected drafts; compressed KV
and index keys are kept by group number. A row is read only where its position says that it belongs to the query's past,
so rejected rows need no rollback and a reused batch slot needs no clearing. Every state has one row more than it
addresses: padding and inactive rows write there and nothing reads it.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .config import ModelConfig

GROUP_TILE = 512
"""Compressed groups are read in whole tiles, so that a score does not depend on how far a call reads."""


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One state tensor: its name, shape (batch slots first) and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def state_spec(config: ModelConfig, dtype: torch.dtype, slots: int, max_seq_len: int, drafter: bool = False) -> list[StateSpec]:
    """The declared order of the state for ``slots`` sequences of at most ``max_seq_len`` positions, the backbone's first.

    swa.{l} [slots, C, head_dim]: window KV of every layer, ring. ckv.{o} [slots, G, head_dim] and ikey.{o}
    [slots, index_head_dim, G]: compressed KV and index keys of every kv source, by group. craw.{o} [slots, R, 2, head_dim]
    fp32: the (kv, score) rows of an incomplete group, where the ratio is above 1, ring. tok [slots, N] int32: the last
    compressed token ids, ring, where there are engram layers. mtp.swa.{i} [slots, C, head_dim]: window KV of every
    drafter stage, ring, where there is a ``drafter``.
    """
    slack = 2 * (config.dspark_block_size + 1)
    dim = config.head_dim
    window = (slots, config.sliding_window + slack + 1, dim)
    spec = [StateSpec(f"swa.{layer}", window, dtype) for layer in range(config.num_hidden_layers)]
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        groups = -(-(max_seq_len // ratio + 1) // GROUP_TILE) * GROUP_TILE
        spec.append(StateSpec(f"ckv.{source}", (slots, groups, dim), dtype))
        spec.append(StateSpec(f"ikey.{source}", (slots, config.index_head_dim, groups), dtype))
        if ratio > 1:
            spec.append(StateSpec(f"craw.{source}", (slots, ratio + slack + 1, 2, dim), torch.float32))
    if config.engram_layer_ids:
        spec.append(StateSpec("tok", (slots, config.engram_max_ngram_size + slack + 1), torch.int32))
    if drafter:
        spec += [StateSpec(f"mtp.swa.{stage}", window, dtype) for stage in range(config.num_nextn_predict_layers)]
    return spec


def allocate(spec: list[StateSpec], device: torch.device | str = "cpu") -> list[Tensor]:
    """Zeroed tensors in the order of ``spec``."""
    return [torch.zeros(entry.shape, dtype=entry.dtype, device=device) for entry in spec]


class Call(NamedTuple):
    """What every layer of one forward call knows about its rows. B sequences of T tokens, the first ``length`` of them real."""

    start: Tensor
    """[B] int64, position of the first token; 0 in an inactive row."""
    length: Tensor
    """[B] int64, real tokens of this call; the rest is padding. 0 in an inactive row."""
    slot: Tensor
    """[B] int64, state slot; -1 marks an inactive row."""
    positions: Tensor
    """[B, T] int64."""
    reach: Tensor
    """[B, T] int64, number of real positions up to and including each token: min(position + 1, start + length)."""
    read_len: int
    """Positions, from 0, whose compressed entries this call may read: a constant of the bucket."""
    rank: Tensor
    """[1] int64, this process's."""


def make_call(start: Tensor, length: Tensor, slot: Tensor, tokens: int, read_len: int, rank: Tensor | None = None) -> Call:
    """Derives the rows of a call; ``start``, ``length`` and ``slot`` are [B] integers. Without ``rank``: of the first one.

    An inactive row stands at position 0 without a real token, so that it reads no state: kernels that sum over the rows of a
    tile with factors of 0 would carry a NaN of its into the rows beside it.
    """
    slot = slot.long()
    start, length = start.long().masked_fill(slot < 0, 0), length.long().masked_fill(slot < 0, 0)
    positions = start[:, None] + torch.arange(tokens, device=start.device)
    reach = torch.minimum(positions + 1, (start + length)[:, None])
    return Call(start, length, slot, positions, reach, read_len, start.new_zeros(1) if rank is None else rank)


class State:
    """The flat list of state tensors of one forward, by name. Writes are in place, so outputs alias inputs."""

    def __init__(self, names: list[str], tensors: tuple[Tensor, ...], call: Call):
        self.tensors = dict(zip(names, tensors, strict=True))
        self.call = call
        self.slot = call.slot.clamp_min(0)[:, None]
        self._past: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._places: dict[int, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def history(self, name: str, rows: int) -> Tensor:
        """The ``rows`` positions before the call's first token from ring ``name``: [B, rows, ...], 0 before the sequence."""
        ring = self.tensors[name]
        index, before = self._before(rows, ring.shape[1] - 1)
        return ring[self.slot, index].masked_fill_(before.view(*before.shape, *[1] * (ring.dim() - 2)), 0)

    def write_ring(self, name: str, rows: Tensor) -> None:
        """Writes the call's real rows [B, T, ...] to ring ``name`` by position; of a long call, the last that fit."""
        ring = self.tensors[name]
        ring.index_put_((self.slot, self._place(ring.shape[1] - 1)), rows.to(ring.dtype))

    def write_groups(self, name: str, rows: Tensor, groups: Tensor, complete: Tensor) -> None:
        """Writes rows [B, n, ...] of the groups [B, n] that the call completes to the compressed state ``name``."""
        state = self.tensors[name]
        by_group = state.mT if name.startswith("ikey.") else state
        index = self._kept(groups, complete, by_group.shape[1] - 1)
        by_group.index_put_((self.slot, index), rows.to(state.dtype))

    def _before(self, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Ring slots [B, rows] of the positions before the call, and which of these lie before the sequence's start."""
        if (rows, size) not in self._past:
            positions = self.call.start[:, None] + torch.arange(-rows, 0, device=self.call.start.device)
            self._past[rows, size] = positions % size, positions < 0
        return self._past[rows, size]

    def _place(self, size: int) -> Tensor:
        """Where in a ring of ``size`` the call's rows [B, T] go."""
        if size not in self._places:
            order = self.call.positions - self.call.start[:, None]
            length = self.call.length[:, None]
            keep = (order < length) & (order >= length - size)
            self._places[size] = self._kept(self.call.positions % size, keep, size)
        return self._places[size]

    def _kept(self, index: Tensor, keep: Tensor, spare: int) -> Tensor:
        """``index`` where kept and the sequence is active; other rows go to the last row, which nothing reads."""
        return torch.where(keep & (self.call.slot >= 0)[:, None], index, spare)


def windows(history: Tensor, rows: Tensor) -> Tensor:
    """History [B, n, ...] and the call's rows [B, T, ...] as one stretch of consecutive positions [B, n + T, ...]."""
    return torch.cat([history.to(rows.dtype), rows], 1)


def groups_read(call: Call, ratio: int, capacity: int) -> int:
    """Compressed groups that a call of ``read_len`` reads: whole tiles, at most the state's ``capacity``."""
    return min(-(-(call.read_len // ratio) // GROUP_TILE) * GROUP_TILE, capacity)
