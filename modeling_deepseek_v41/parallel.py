# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute one model together: their groups, what they exchange, and the layers that are split among them.

The one place that knows process groups. Model code is the same for any number of ranks: in a group of one, which is what
a model gets where nobody says otherwise, every exchange hands back what it was given. A rank enters a forward as a tensor,
so that one graph serves all of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

from .layout import Layout, Mesh
from .linear import Linear, frozen
from .numerics import Arithmetic


class Group:
    """``size`` ranks that exchange tensors. Every rank of the group takes part in every call, in the same order.

    places: the place in its group of every world rank. process_group: torch.distributed's; None in a group of one, and
    where shapes alone are wanted.
    """

    def __init__(self, mesh: Mesh, process_group: Any = None):
        self.size = len(mesh[0])
        self.process_group = process_group
        order = {rank: place for row in mesh for place, rank in enumerate(row)}
        self.places = tuple(order[rank] for rank in range(len(order)))

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` [...] fp32 added up, the same bits on every rank."""
        return self.sums(x)[0]

    def sums(self, *tensors: Tensor) -> list[Tensor]:
        """``sum`` of several tensors [..., n_i] that differ in their last dimension only, in one exchange."""
        if self.size == 1:
            return list(tensors)
        widths = [tensor.shape[-1] for tensor in tensors]
        return list(self.all_reduce(torch.cat(tensors, -1)).split(widths, -1))

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` [..., n] side by side in the order of their places: [..., size * n]."""
        return self.gathers(x)[0]

    def gathers(self, *tensors: Tensor) -> list[Tensor]:
        """``gather`` of several tensors [..., n_i] that differ in their last dimension only, in one exchange."""
        if self.size == 1:
            return list(tensors)
        widths = [tensor.shape[-1] for tensor in tensors]
        parts = self.all_gather(torch.cat(tensors, -1)).split(widths, -1)
        return [part.movedim(0, -2).flatten(-2) for part in parts]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' ``x``, added up in the order of their places.

        Other orders depend on an element's place in the tensor, so that a row's bits would depend on the rows beside it.
        """
        first, *others = self.all_gather(x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` [...] in the order of their places: [size, ...]."""
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        torch.distributed.all_gather(list(out.unbind(0)), x, group=self.process_group)
        return out


@dataclasses.dataclass(frozen=True)
class Parallel:
    """What a model's modules know of the other ranks. ``rank`` is this process's, for loading; forwards get it as a tensor."""

    layout: Layout
    rank: int
    world: Group
    attention: Group

    @property
    def o_proj(self) -> Group:
        """The ranks among which wo_b is split."""
        return self.world if self.layout.o_proj_reduce == "world" else self.attention

    def rank_tensor(self) -> Tensor:
        """This process's rank as a forward takes it: [1] int64."""
        return torch.tensor([self.rank])


def unconnected(layout: Layout, rank: int) -> Parallel:
    """``layout`` as ``rank`` sees it, without process groups: enough for shapes and, in a world of one, for everything."""
    world = tuple(range(layout.world_size))
    return Parallel(layout, rank, Group((world,)), Group(layout.mesh))


def connect(layout: Layout) -> Parallel:
    """``layout`` on the processes of torch.distributed, which is initialised; every one of them calls this, once."""
    rank = torch.distributed.get_rank()
    mine = None
    for row in layout.mesh:
        group = torch.distributed.new_group(list(row))
        mine = group if rank in row else mine
    world = tuple(range(layout.world_size))
    return Parallel(layout, rank, Group((world,), torch.distributed.group.WORLD), Group(layout.mesh, mine))


SINGLE = unconnected(Layout(), 0)
"""One process that holds everything."""


def place_of(places: Sequence[int], rank: Tensor) -> Tensor:
    """The entry of ``places``, one per world rank, that belongs to ``rank`` [1]: [1] int64."""
    return torch.tensor(places, device=rank.device).index_select(0, rank)


def own_part(x: Tensor, tile: int, parts: int, place: Tensor) -> Tensor:
    """Part number ``place`` [1] of every ``tile`` of x [..., n * tile], each cut into ``parts``: [..., n * tile / parts]."""
    return x.unflatten(-1, (-1, parts, tile // parts)).index_select(-2, place).flatten(-3)


def join_parts(x: Tensor, tile: int, parts: int) -> Tensor:
    """The inverse of ``own_part``, of what ``gather`` gave: [..., n * tile] by part to [..., n * tile] by tile."""
    return x.unflatten(-1, (parts, -1, tile // parts)).transpose(-3, -2).flatten(-3)


class ColumnParallelLinear(Linear):
    """A linear whose outputs are split: W [ceil(n / size), k]; ranks behind the last output hold rows of zeros.

    Returns the rank's own outputs, or all n of them where it ``gathers``.
    """

    def __init__(self, k: int, n: int, arithmetic: Arithmetic, group: Group, *, rounds: bool = True, gathers: bool = False):
        super().__init__(k, -(-n // group.size), arithmetic, rounds=rounds)
        self.group, self.outputs, self.gathers = group, n, gathers

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, k] fp32, the same on every rank, to [B, T, n / size], or [B, T, n] where it gathers."""
        y = super().forward(x)
        return self.group.gather(y)[..., : self.outputs] if self.gathers else y


class RowParallelLinear(Linear):
    """A linear whose inputs are split: W [n, k / size]. Partial sums stay fp32 until they are added up; then one rounding."""

    def __init__(self, k: int, n: int, arithmetic: Arithmetic, group: Group):
        super().__init__(k // group.size, n, arithmetic, rounds=group.size == 1)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """The rank's part of the inputs [B, T, k / size] fp32 to [B, T, n], the same on every rank."""
        return self.added_up(super().forward(x))

    def added_up(self, y: Tensor) -> Tensor:
        """The ranks' products y [B, T, n], rounded where ``rounds``, to their sum, the same on every rank, rounded."""
        return y if self.group.size == 1 else self.arithmetic.round(self.group.sum(y))


def own_rows(ids: Tensor, rank: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which of the table rows ``ids`` [...] are among the ``rows`` that ``rank`` [1] holds.

    Returns their numbers there, 0 for rows of other ranks, and bool [...].
    """
    local = ids - rank * rows
    here = (local >= 0) & (local < rows)
    return local.masked_fill(~here, 0), here


class ParallelEmbedding(nn.Module):
    """Token embedding, weight bf16 [ceil(vocab / size), d]: rows split over ``group``, rows behind the vocabulary are zeros."""

    def __init__(self, vocab: int, d: int, group: Group):
        super().__init__()
        self.group = group
        self.weight = frozen(-(-vocab // group.size), d, dtype=torch.bfloat16)

    def forward(self, ids: Tensor, rank: Tensor) -> Tensor:
        """ids [B, T] int64 and this process's rank [1] to [B, T, d] fp32."""
        return self.group.sum(self.part(ids, rank))

    def part(self, ids: Tensor, rank: Tensor) -> Tensor:
        """What this rank adds to the result: its own rows, 0 for those of others; [B, T, d] fp32."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight).float()
        local, here = own_rows(ids, rank, self.weight.shape[0])
        return F.embedding(local, self.weight).float() * here.unsqueeze(-1)
