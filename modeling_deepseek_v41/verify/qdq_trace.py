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
from ..dspark.stage import Stage
from ..indexer import Indexer
from ..model import DeepseekV41Model
from ..numerics import Arithmetic
from ..projections import query_projection
from ..state import Call
from .parts import blocks

DISTANCES = (1e-5, 3e-6, 1e-6, 3e-7)
"""Distances from a rounding boundary that are tried, relative to the largest magnitude of the group that shares a scale."""


@dataclasses.dataclass(frozen=True, order=True)
class Flip:
    """A group of values of one QDQ whose codes change when each value moves by ``distance`` of the group's largest."""

    distance: float
    block: str
    """layers.<l> or mtp.<i>, as in the checkpoint."""
    kind: str
    batch: int
    position: int
    """Of the token that completes the values."""
    seen_from: int
    """The first query position that can see them."""
    index: tuple[int, ...]
    """Where the group is in the tensor that one call quantises."""
    start: int
    """Position of the call's first token."""
    sign: int

    def __str__(self) -> str:
        return f"{self.block} {self.kind} at position {self.position}, {self.distance:.0e} from a rounding boundary"


class QdqTrace:
    """Replaces the quantisers of ``model``'s caches while it is entered; no fused operation quantises window KV meanwhile.

    ``near`` collects every group at a boundary; groups in ``forced`` get the codes of the other side.
    """

    def __init__(self, model: DeepseekV41Model):
        self._model = model
        self.near: set[Flip] = set()
        self.forced: set[Flip] = set()
        self._start = 0
        self._tokens = 0
        self._drafting = False
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> "QdqTrace":
        self._undo.append(self._model.register_forward_pre_hook(self._begin).remove)
        for name, block in blocks(self._model).items():
            if isinstance(block, Stage):
                self._undo.append(block.register_forward_pre_hook(self._begin_draft).remove)
            for module in (block.attn, block.attn.compressor, block.attn.indexer):
                if module is not None:
                    self._watch(module, name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _watch(self, module: Attention | Compressor | Indexer, block: str) -> None:
        plain = module.numerics
        values = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        values["ops"] = dataclasses.replace(plain.ops, query_projection=query_projection)
        module.numerics = _Watched(**values, trace=self, block=block, ratio=module.ratio)
        self._undo.append(lambda: setattr(module, "numerics", plain))

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        ids, start = args[:2]
        self._start, self._tokens, self._drafting = int(start[0]), ids.shape[1], False

    def _begin_draft(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        call: Call = args[3]
        self._start, self._tokens, self._drafting = int(call.start[0]), call.positions.shape[1], True

    def quantise(self, qdq: Callable[[Tensor], Tensor], x: Tensor, block: str, kind: str, size: int, ratio: int) -> Tensor:
        """qdq(x) of one call, with forced groups changed; x [B, n, (heads,) k] in groups of ``size`` values.

        ``ratio``: 0 where row j of x belongs to token j, else to the group of that many tokens. A draft block's KV is seen
        by all of the block, the KV of other calls from its own token on.
        """
        kind = f"draft {kind}" if self._drafting else kind
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
            seen_from = self._start if self._drafting else position
            flip = Flip(distance, block, kind, index[0], position, seen_from, index, self._start, sign)
            self.near.add(flip)
            if flip in self.forced:
                exact[index] = moved(distance, sign)[index]
        return exact.flatten(-2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched(Arithmetic):
    trace: QdqTrace
    block: str
    ratio: int

    def window_kv(self, kv: Tensor) -> Tensor:
        return self.trace.quantise(super().window_kv, kv, self.block, "window KV", 32, 0)

    def rotated_window_kv(self, kv: Tensor, table: Tensor) -> Tensor:
        return self.window_kv(self.ops.rotate(kv, table, self))

    def rotated_compressed_kv(self, kv: Tensor, table: Tensor) -> Tensor:
        return self.compressed_kv(self.ops.rotate(kv, table, self))

    def rotated_index(self, x: Tensor, table: Tensor) -> Tensor:
        return self.index(self.ops.rotate(x, table, self))

    def compressed_kv(self, kv: Tensor) -> Tensor:
        return self.trace.quantise(super().compressed_kv, kv, self.block, "compressed KV", 16, self.ratio)

    def index(self, x: Tensor) -> Tensor:
        is_query = x.dim() == 4
        kind = "index query" if is_query else "index key"
        return self.trace.quantise(super().index, x, self.block, kind, 32, 0 if is_query else self.ratio)
