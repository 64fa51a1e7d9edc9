# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as modules read it: whole, or one rank's parts of it."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..shard_plan import Part, ShardPlan
from .reader import Checkpoint


class Source(Protocol):
    """What a module's ``load`` reads from; ``Checkpoint`` has it, and ``RankCheckpoint`` with a rank's shapes."""

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name`` as stored, in memory of its own."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the same."""

    def mapped(self, name: str) -> Tensor:
        """The same as a read-only memory map."""

    def linear(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the linear ``name``, decoded to values where it has a scale."""


class RankCheckpoint:
    """The parts of ``checkpoint`` that one rank holds, under the names and in the shapes of the rank's own modules."""

    def __init__(self, checkpoint: Checkpoint, plan: ShardPlan):
        self._checkpoint, self._plan = checkpoint, plan

    def tensor(self, name: str) -> Tensor:
        """The rank's part of ``Checkpoint.tensor``."""
        name = self._plan.stored_name(name)
        part = self._plan.part(name)
        if part is None:
            return self._checkpoint.tensor(name)
        if part.dim == 1:
            return _columns(self._checkpoint.tensor(name), part)
        return self._part_rows(self._checkpoint.rows, name, name, part)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of ``tensor(name)``."""
        name = self._plan.stored_name(name)
        part = self._plan.part(name)
        if part is None or part.dim == 1:
            rows = self._checkpoint.rows(name, start, stop)
            return rows if part is None else _columns(rows, part)
        return self._part_rows(self._checkpoint.rows, name, name, part, start, stop)

    def mapped(self, name: str) -> Tensor:
        """The rank's rows of ``Checkpoint.mapped``; copied only where they reach behind the table's end."""
        part = self._plan.part(name)
        if part is None:
            return self._checkpoint.mapped(name)
        return self._part_rows(self._checkpoint.mapped, name, name, part)

    def linear(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the rank's part of ``Checkpoint.linear``."""
        part = self._plan.part(f"{name}.weight")
        if part is None or part.dim == 1:
            rows = self._checkpoint.linear(name, start, stop)
            return rows if part is None else _columns(rows, part)
        return self._part_rows(self._checkpoint.linear, name, f"{name}.weight", part, start, stop)

    def _part_rows(
        self,
        read: Callable[[str, int, int], Tensor],
        name: str,
        weight: str,
        part: Part,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Rows ``start`` to ``stop``, by default the last, of a part of ``name`` by ``read``; ``weight`` has its rows."""
        size = self._checkpoint.tensors[weight].shape[0]
        first, end = part.of(size)
        stop = end - first if stop is None else stop
        return _with_zero_rows(read(name, min(first + start, size), min(first + stop, size)), stop - start)


def _columns(x: Tensor, part: Part) -> Tensor:
    start, stop = part.of(x.shape[1])
    return x[:, start:stop].clone()


def _with_zero_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] with rows of zeros behind it: [rows, ...]."""
    if x.shape[0] == rows:
        return x
    out = torch.zeros(rows, *x.shape[1:], dtype=x.dtype)
    out[: x.shape[0]] = x
    return out
