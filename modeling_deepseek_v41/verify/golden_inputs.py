# SPDX-License-Identifier: Apache-2.0
"""A forward of the whole model in which every module gets the golden's inputs.

Hooks on the modules hand each output to a comparison and put the golden's tensor in its place, so that no difference is
carried from one layer, sublayer or call to the next. Where the set has no tensor, the model's own goes on.
"""

import dataclasses
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Attention
from ..dspark.drafter import Drafts
from ..dspark.stage import Stage
from ..indexer import Indexer
from ..model import Block, DeepseekV41Model
from ..numerics import Arithmetic
from ..projections import Projected
from ..state import Call, State
from .index_ties import index_scores, tied_rows
from .parts import blocks

Compare = Callable[..., None]
"""compare(block, kind, found, golden, positions, settled=None): ``found`` and ``golden`` [n, ...] of one sequence, the query
``positions`` [n] that first see each row, and rows [n] bool that differ without being wrong."""


class GoldenInputs:
    """While it is entered, forwards of ``model`` on one sequence, in slot 0, run on the golden's tensors.

    ``golden`` is a layer file: <call>.layers.<l>.<kind>, and <call>.mtp.<i>.<kind> of the drafter's stages. Set ``call``
    before each forward and each draft. ``compare`` is told of every tensor that the file has.
    """

    def __init__(self, model: DeepseekV41Model, golden: dict[str, Tensor], compare: Compare):
        self._model, self._golden, self._compare = model, golden, compare
        self._undo: list[Callable[[], None]] = []
        self._positions = torch.zeros(0, dtype=torch.int64)
        self.call = "prefill"
        self.used: set[str] = set()
        """Keys of ``golden`` that a module's output was compared with."""

    def __enter__(self) -> "GoldenInputs":
        self._before(self._model, self._begin)
        for name, block in blocks(self._model).items():
            self._attach(name, block)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def taps(self, found: Tensor) -> Tensor:
        """Compares the call's taps [1, T, targets * d] with the golden's main_hidden and gives that, or ``found``."""
        golden = self._get("main_hidden")
        if golden is None:
            return found
        self._compare(self.call, "main_hidden", found[0], golden[0], self._positions)
        return golden.to(found.dtype)

    def drafts(self, found: Drafts) -> None:
        """Compares ids, with the newest token before them, and confidence; the draft depends on the block's first position."""
        for kind, tensor in (("ids", found.ids), ("confidence", found.confidence)):
            golden = self._get(kind)
            if golden is not None:
                self._compare(self.call, kind, tensor[0], golden[0], self._positions[:1].expand(tensor.shape[1]))

    def _get(self, name: str) -> Tensor | None:
        """The golden's tensor ``name`` of this call, which counts as used; None where there is none."""
        key = f"{self.call}.{name}"
        if key in self._golden:
            self.used.add(key)
        return self._golden.get(key)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        ids, start = args[:2]
        self._positions = torch.arange(ids.shape[1]) + int(start[0])

    def _begin_draft(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        call: Call = args[3]
        self._positions = call.positions[0]

    def _find(self, block: str, kind: str) -> Tensor | None:
        return self._get(f"{block}.{kind}")

    def _replaced(self, kind: str, block: str, found: Tensor) -> Tensor:
        """Compares ``found`` [1, T, ...] with the golden's tensor and gives that, or ``found`` where there is none."""
        golden = self._find(block, kind)
        if golden is None:
            return found
        self._compare(block, kind, found[0], golden[0], self._positions)
        return golden.to(found.dtype)

    def _attach(self, name: str, block: Block) -> None:
        if isinstance(block, Stage):
            self._before(block, self._begin_draft)
        self._window(block.attn, name)
        self._input(block.attn, name, "attn_in")
        self._output(block.attn, name, "attn_out")
        self._input(block.ffn, name, "ffn_in")
        self._output(block.ffn, name, "ffn_out")
        self._output(block, name, "x_out", "pre_out")
        self._after(block.ffn.gate, lambda module, args, out: self._gate(name, *out[:2]))
        if block.engram is not None:
            self._output(block.engram, name, "engram_out")
        compressor, indexer = block.attn.compressor, block.attn.indexer
        if compressor is not None:
            self._after(compressor, lambda module, args, out: self._latent(name, compressor.ratio, *out))
        if indexer is not None:
            self._before(indexer, lambda module, args: self._published(name, indexer, args[-1]))
            self._after(indexer, lambda module, args, out: self._selection(name, indexer, args, *out))

    def _before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._undo.append(module.register_forward_pre_hook(hook).remove)

    def _after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._undo.append(module.register_forward_hook(hook).remove)

    def _input(self, module: nn.Module, block: str, kind: str) -> None:
        self._before(module, lambda module, args: (self._replaced(kind, block, args[0]), *args[1:]))

    def _output(self, module: nn.Module, block: str, *kinds: str) -> None:
        """The first outputs of ``module``, one of each kind."""

        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            if not isinstance(out, tuple):
                return self._replaced(kinds[0], block, out)
            first = [self._replaced(kind, block, value) for kind, value in zip(kinds, out, strict=False)]
            return (*first, *out[len(kinds) :])

        self._after(module, hook)

    def _window(self, attention: Attention, block: str) -> None:
        plain = attention.numerics
        attention.numerics = cast(Arithmetic, _GoldenWindow(plain, lambda kv: self._newest(block, kv)))
        self._undo.append(lambda: setattr(attention, "numerics", plain))

    def _newest(self, block: str, kv: Tensor) -> Tensor:
        """Window KV [1, T, D] of a call, the newest rows compared with the golden's ring and replaced by it.

        A single value that was rounded the other way would else show in every row that attends to it.
        """
        golden = self._find(block, "window_ring")
        if golden is None:
            return kv
        newest = self._positions[-golden.shape[1] :]
        rows = golden[0, newest % golden.shape[1]]
        count = newest.numel()
        self._compare(block, "window_ring", kv[0, -count:], rows, newest)
        return torch.cat([kv[:, :-count], rows.unsqueeze(0).to(kv.dtype)], 1)

    def _gate(self, block: str, ids: Tensor, weights: Tensor) -> None:
        """Expert ids and weights have no order in the golden: both are compared by ascending id."""
        golden_ids = self._find(block, "gate_indices")
        if golden_ids is None:
            return
        golden_weights = self._find(block, "gate_weights")
        found, order = ids[0].sort(-1)
        expected, golden_order = golden_ids[: len(found)].long().sort(-1)
        self._compare(block, "gate_indices", found, expected, self._positions)
        if golden_weights is not None:
            pair = weights[0].gather(-1, order), golden_weights[: len(found)].gather(-1, golden_order)
            self._compare(block, "gate_weights", *pair, self._positions)

    def _latent(self, block: str, ratio: int, latent: Tensor, groups: Tensor, complete: Tensor) -> Any:
        golden = self._find(block, "compressor_latent_pre_rope")
        if golden is None:
            return None
        done = int(complete.sum())
        first = int(complete[0].int().argmax())
        rows = slice(first, first + done)
        closes = groups[0, rows] * ratio + ratio - 1
        self._compare(block, "compressor_latent_pre_rope", latent[0, rows], golden[0, :done], closes)
        latent = latent.clone()
        latent[:, rows] = golden[:, :done].to(latent.dtype)
        return latent, groups, complete

    def _published(self, block: str, indexer: Indexer, state: State) -> None:
        """Compressed KV and index keys, which stand in the state when the indexer begins."""
        for kind, name in (("compress_kv", f"ckv.{indexer.source}"), ("index_k", f"ikey.{indexer.source}")):
            golden = self._find(block, kind)
            if golden is None:
                continue
            stored = state[name].mT if kind == "index_k" else state[name]
            closes = torch.arange(golden.shape[1]) * indexer.ratio + indexer.ratio - 1
            known = closes[closes <= self._positions[-1]]
            count = known.numel()
            self._compare(block, kind, stored[0, :count], golden[0, :count], known)
            stored[0, :count] = golden[0, :count]

    def _selection(self, block: str, indexer: Indexer, args: Any, chosen: Tensor, candidates: Tensor | None) -> Any:
        call: Call = args[4]
        scores, visible = index_scores(indexer, *args)
        golden = self._find(block, "topk_idxs_with_offset")
        if golden is not None:
            offset = call.positions.shape[1] if self.call == "prefill" else self._model.config.sliding_window
            golden = torch.where(golden < 0, golden, golden - offset).long()
            golden = F.pad(golden, (0, chosen.shape[-1] - golden.shape[-1]), value=-1)
            settled = tied_rows(_mask(chosen[0], scores), _mask(golden[0], scores), scores.masked_fill(~visible, -torch.inf))
            self._compare(block, "topk_idxs_with_offset", chosen[0], golden[0], self._positions, settled)
            chosen = golden
        if indexer.is_candidate_source and candidates is not None:
            candidates = self._candidates(block, indexer, scores.masked_fill(~visible, -torch.inf), candidates)
        return chosen, candidates

    def _candidates(self, block: str, indexer: Indexer, scores: Tensor, candidates: Tensor) -> Tensor:
        mask = self._get("candidates")
        if mask is None:
            return candidates
        size, blocks = indexer.config.candidate_block_size, candidates.shape[-1]
        golden = F.pad(mask, (0, -mask.shape[-1] % size)).unflatten(-1, (-1, size)).any(-1)
        golden = F.pad(golden, (0, blocks - golden.shape[-1]))
        best = F.pad(scores, (0, blocks * size - scores.shape[-1]), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        found = candidates.repeat_interleave(size, -1)[..., : mask.shape[-1]]
        self._compare(block, "candidates", found[0], mask[0], self._positions, tied_rows(candidates[0], golden[0], best))
        return golden


class _GoldenWindow:
    """An arithmetic whose window KV passes through ``replace``, once, whether an operation makes it or the arithmetic does."""

    def __init__(self, plain: Arithmetic, replace: Callable[[Tensor], Tensor]):
        self._plain, self._replace = plain, replace
        self.ops = dataclasses.replace(plain.ops, query_projection=self._query_projection)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _query_projection(self, *args: Any) -> Projected:
        found = self._plain.ops.query_projection(*(self._plain if arg is self else arg for arg in args))
        return found._replace(kv=self._replace(found.kv))

    def rotated_window_kv(self, kv: Tensor, table: Tensor) -> Tensor:
        return self._replace(self._plain.rotated_window_kv(kv, table))


def _mask(chosen: Tensor, scores: Tensor) -> Tensor:
    """Group numbers [n, k], -1 for none, as bool [n, groups]."""
    mask = torch.zeros(chosen.shape[0], scores.shape[-1] + 1, dtype=torch.bool)
    return mask.scatter(-1, chosen % mask.shape[-1], True)[:, :-1]
