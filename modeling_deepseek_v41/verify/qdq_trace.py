# SPDX-License-Identifier: Apache-2.0
"""Watching the cache quantisers of a model: which values lie at a rounding boundary, and what if they rounded the other way.

Two correct fp32 implementations differ in the last bits. Where a value lies that close to a boundary of its QDQ, they may
round it to different codes, which moves everything computed from it by far more than the last bits.
"""

import dataclasses
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ..attention import Attention
from ..compressor import Compressor
from ..indexer import Indexer
from ..model import DeepseekV41Model
from ..numerics import Arithmetic
from .parts import blocks

DISTANCES = (1e-5, 3e-6, 1e-6, 3e-7)
"""Distances from a rounding boundary that are tried, relative to the largest magnitude of the group that shares a scale."""


@dataclasses.dataclass(frozen=True, order=True)
class Flip:
    """A group of values of one QDQ whose codes change when each value moves by ``distance`` of the group's largest."""

    distance: float
    layer: int
    kind: str
    batch: int
    position: int
    """The first query position that can see the values."""
    index: tuple[int, ...]
    """Where the group is in the tensor that one call quantises."""
    start: int
    """Position of the call's first token."""
    sign: int

    def __str__(self) -> str:
        return f"layer {self.layer} {self.kind} at position {self.position}, {self.distance:.0e} from a rounding boundary"


class QdqTrace:
    """Replaces the quantisers of ``model``'s caches while it is entered.

    ``near`` collects every group at a boundary; groups in ``forced`` get the codes of the other side.
    """

    def __init__(self, model: DeepseekV41Model):
        self._model = model
        self.near: set[Flip] = set()
        self.forced: set[Flip] = set()
        self._start = 0
        self._tokens = 0
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> "QdqTrace":
        self._undo.append(self._model.register_forward_pre_hook(self._begin).remove)
        for layer, block in enumerate(blocks(self._model)):
            for module in (block.attn, block.attn.compressor, block.attn.indexer):
                if module is not None:
                    self._watch(module, layer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _watch(self, module: Attention | Compressor | Indexer, layer: int) -> None:
        plain = module.numerics
        values = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        module.numerics = _Watched(**values, trace=self, layer=layer, ratio=module.ratio)
        self._undo.append(lambda: setattr(module, "numerics", plain))

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        ids, start = args[:2]
        self._start, self._tokens = int(start[0]), ids.shape[1]

    def quantise(self, qdq: Callable[[Tensor], Tensor], x: Tensor, layer: int, kind: str, size: int, ratio: int) -> Tensor:
        """qdq(x) of one call, with forced groups changed; x [B, n, (heads,) k] in groups of ``size`` values.

        ``ratio``: 0 where row j of x belongs to token j, else to the group of that many tokens.
        """
        exact = qdq(x).unflatten(-1, (-1, size))
        groups = x.float().unflatten(-1, (-1, size))
        reach = groups.abs().amax(-1, keepdim=True)

        def moved(distance: float, sign: int) -> Tensor:
            return qdq((groups + sign * distance * reach).flatten(-2)).unflatten(-1, (-1, size))

        nearest: dict[tuple[int, ...], tuple[float, int]] = {}
        for distance in DISTANCES:
            changed = {sign: (moved(distance, sign) != exact).any(-1).nonzero().tolist() for sign in (1, -1)}
            nearest |= {tuple(index): (distance, sign) for sign, indices in changed.items() for index in indices}
            if not any(changed.values()):
                break
        for index, (distance, sign) in nearest.items():
            row = index[1]
            position = (self._start // ratio + row + 1) * ratio - 1 if ratio else self._start + row
            if position >= self._start + self._tokens:
                continue
            flip = Flip(distance, layer, kind, index[0], position, index, self._start, sign)
            self.near.add(flip)
            if flip in self.forced:
                exact[index] = moved(distance, sign)[index]
        return exact.flatten(-2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched(Arithmetic):
    trace: QdqTrace
    layer: int
    ratio: int

    def window_kv(self, kv: Tensor) -> Tensor:
        return self.trace.quantise(super().window_kv, kv, self.layer, "window KV", 32, 0)

    def compressed_kv(self, kv: Tensor) -> Tensor:
        return self.trace.quantise(super().compressed_kv, kv, self.layer, "compressed KV", 16, self.ratio)

    def index(self, x: Tensor) -> Tensor:
        is_query = x.dim() == 4
        kind = "index query" if is_query else "index key"
        return self.trace.quantise(super().index, x, self.layer, kind, 32, 0 if is_query else self.ratio)
