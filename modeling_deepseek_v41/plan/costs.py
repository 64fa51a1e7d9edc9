# SPDX-License-Identifier: Apache-2.0
"""What one call costs a rank, and the tracer that counts it while the call runs on the meta device.

Nothing is computed and nothing is allocated: the model's own forward says which products it makes, which weights and state it
reads and what it exchanges. A read of a tensor's values on the host would fail there, so a call that is traced has none.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ..layout import Mesh
from ..parallel import Group

aten = torch.ops.aten


class Product(NamedTuple):
    """``times`` matrix products [m, k] x [k, n]."""

    times: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Two per multiplication with its addition."""
        return 2 * self.times * self.m * self.k * self.n


class Resident(NamedTuple):
    """A tensor that stays in device memory between calls: its group in the tables, its elements and its bytes."""

    group: str
    numel: int
    nbytes: int


@dataclasses.dataclass
class Exchanges:
    """Exchanges of one kind in one group of ranks. ``nbytes``: of the sums, or of what was put together, on one rank."""

    count: int = 0
    nbytes: int = 0


class ExpertCall(NamedTuple):
    """One call of the routed experts: ``rows`` tokens, the rank's ``local`` experts, their bytes and their products.

    ``group``: theirs in the tables, which tells a drafter's.
    """

    group: str
    rows: int
    top_k: int
    local: int
    nbytes: int
    products: tuple[Product, ...]


@dataclasses.dataclass
class Costs:
    """Of one call, on one rank."""

    exchanges: dict[tuple[str, str], Exchanges] = dataclasses.field(default_factory=dict)
    """By group (world, attention) and kind (sum, gather)."""
    reads: Counter[str] = dataclasses.field(default_factory=Counter)
    """Bytes of weights and state that are read, by group; every local expert once per layer."""
    writes: Counter[str] = dataclasses.field(default_factory=Counter)
    """Bytes of state that are written, by group."""
    products: list[Product] = dataclasses.field(default_factory=list)
    """All but the routed experts'."""
    experts: list[ExpertCall] = dataclasses.field(default_factory=list)
    """The routed experts, layer by layer: every local expert over every row."""

    @property
    def flops(self) -> int:
        """Of all matrix products but the routed experts'."""
        return sum(product.flops for product in self.products)

    @property
    def expert_flops(self) -> int:
        """Of the routed experts."""
        return sum(product.flops for call in self.experts for product in call.products)

    def count(self, group: str) -> int:
        """Exchanges in ``group``."""
        return sum(entry.count for (name, _), entry in self.exchanges.items() if name == group)


class TracedGroup(Group):
    """A group called ``name`` that hands back tensors of the right shape and tells ``trace`` of them."""

    def __init__(self, name: str, mesh: Mesh, trace: "Trace"):
        super().__init__(mesh)
        self._name, self._trace = name, trace

    def all_reduce(self, x: Tensor) -> Tensor:
        """A tensor like ``x``."""
        self._trace.exchanged(self._name, "sum", x)
        return torch.empty_like(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """A tensor [size, ...]."""
        out = x.new_empty(self.size, *x.shape)
        self._trace.exchanged(self._name, "gather", out)
        return out


def _matrices(a: Tensor, b: Tensor) -> tuple[Product, ...]:
    return (Product(math.prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]),)


def _bank(rows: int, bank: list[Tensor], d: int) -> tuple[Product, ...]:
    """Every expert of ``bank`` over ``rows``: w13 [E, 2I, ...] is its first tensor."""
    experts, both = bank[0].shape[:2]
    return Product(experts, rows, d, both), Product(experts, rows, both // 2, d)


def _rows(x: Tensor) -> int:
    return x.shape[0] * x.shape[1]


PRODUCTS: dict[Any, Callable[..., tuple[Product, ...]]] = {
    aten.mm: _matrices,
    aten.bmm: _matrices,
    aten.addmm: lambda bias, a, b: _matrices(a, b),
    aten.baddbmm: lambda bias, a, b: _matrices(a, b),
}
"""The matrix products that an operation makes, from its arguments; the experts' own operation is treated apart."""

GATHERS = {aten.embedding, aten.index_select, aten.index, aten.gather}
"""Operations that read as much of their first tensor as they give back."""

WRITES = {aten.index_put_: 2, aten.copy_: 1}
"""Operations that write to their first argument, and which one is written."""

LOCAL_EXPERTS = torch.ops.deepseek_v41.local_experts


@register_flop_formula(LOCAL_EXPERTS, get_raw=True)
def expert_flops(x: Tensor, ids: Tensor, weights: Tensor, bank: list[Tensor], *rest: Any, **named: Any) -> int:
    """Of ``local_experts`` in a static graph: every local expert over every row."""
    return sum(product.flops for product in _bank(_rows(x), bank, x.shape[-1]))


class Trace(TorchDispatchMode):
    """Counts what runs inside it into ``costs``; ``resident`` tells tensors of device memory from intermediates.

    Views cost nothing. What is neither a view nor in ``resident`` is an intermediate: taken to stay on the chip.
    """

    def __init__(self) -> None:
        super().__init__()
        self.costs = Costs()
        self._resident: dict[int, Resident] = {}

    def keep(self, tensor: Tensor, group: str) -> None:
        """Declares ``tensor`` to be in device memory and counted under ``group``."""
        self._resident[tensor.untyped_storage()._cdata] = Resident(group, tensor.numel(), tensor.nbytes)

    @property
    def resident(self) -> list[Resident]:
        """All that was declared."""
        return list(self._resident.values())

    def exchanged(self, group: str, kind: str, tensor: Tensor) -> None:
        """One exchange in ``group``."""
        entry = self.costs.exchanges.setdefault((group, kind), Exchanges())
        entry.count += 1
        entry.nbytes += tensor.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is LOCAL_EXPERTS:
            self._experts(*args)
        elif packet in PRODUCTS:
            self.costs.products += PRODUCTS[packet](*args)
        elif packet in flop_registry:
            raise NotImplementedError(f"{packet}: a matrix product that the plan cannot count")
        if not func.is_view:
            self._traffic(packet, args, out)
        return out

    def _experts(self, x: Tensor, ids: Tensor, weights: Tensor, bank: list[Tensor], *rest: Any) -> None:
        rows, d = _rows(x), x.shape[-1]
        known = [self._resident[tensor.untyped_storage()._cdata] for tensor in bank]
        nbytes = sum(resident.nbytes for resident in known)
        local, products = bank[0].shape[0], _bank(rows, bank, d)
        self.costs.experts.append(ExpertCall(known[0].group, rows, ids.shape[-1], local, nbytes, products))

    def _traffic(self, packet: Any, args: Any, out: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        for place, tensor in enumerate(tensors):
            known = self._resident.get(tensor.untyped_storage()._cdata)
            if known is None or packet.__name__.startswith("new_") or packet.__name__.endswith("_like"):
                continue
            if packet in WRITES and place == 0:
                values = args[WRITES[packet]]
                self.costs.writes[known.group] += values.numel() * known.nbytes // known.numel
                continue
            amount = out.numel() if packet in GATHERS and place == 0 else tensor.numel()
            self.costs.reads[known.group] += amount * known.nbytes // known.numel
