# SPDX-License-Identifier: Apache-2.0
"""The operations that run as NKI kernels: how a model's tensors are laid out for each, and how a kernel is launched.

Importing this module needs no ``nki``; making the operations does.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import experts
from ..attention import Far
from ..rope import rotate
from ..state import GROUP_TILE, State, windows
from .dispatch import TORCH
from .nki.experts_layout import exact_rows, pack, stack
from .operations import Operations

if TYPE_CHECKING:
    from ..numerics import Arithmetic

Launch = Callable[..., Any]
"""launch(kernel, *tensors, cores=2, **constants) runs a kernel and returns what it returns, as tensors."""

PARTITIONS, BANK = 128, 512
"""Rows per kernel call; window rows and selected rows per kernel call (kernels/nki/split.py)."""
ROUTING = 8192
"""Rows times experts per kernel call: 32 KiB of routing weights in every partition."""
HIDDEN = -1e30
"""Added to the scores of window rows that a query does not see (kernels/nki/sparse_attention.py)."""


def on_device() -> Operations:
    """The kernels on the two physical cores of a Neuron device's logical core. Not verified on a device."""

    def launch(kernel: Any, *tensors: Tensor, cores: int = 2, **constants: Any) -> Any:
        return kernel[cores](*tensors, **constants)

    return nki_operations("nki", launch)


def nki_operations(name: str, launch: Launch) -> Operations:
    """The operations ``name``: ``launch`` runs the kernels, PyTorch does what has none. Raises ImportError without nki.

    Each keeps the contract of its PyTorch function. index_scores returns the same values in the arithmetic's dtype, for
    the search of top_ascending in bf16 takes half the steps.
    """
    kernels = _Kernels(launch)
    return dataclasses.replace(
        TORCH,
        name=name,
        attend=kernels.attend,
        attend_block=kernels.attend_block,
        index_scores=kernels.index_scores,
        top_ascending=kernels.top_ascending,
        quantise=kernels.quantise,
        mixes=kernels.mixes,
        expert_rows=kernels.expert_rows,
        expert_by_expert=kernels.expert_by_expert,
        traced_experts=kernels.expert_by_expert,
    )


class _Kernels:
    """Each operation as a launch of its kernel on tensors in the kernel's layout."""

    def __init__(self, launch: Launch):
        from .nki.activation_qdq import activation_qdq
        from .nki.experts import active_experts
        from .nki.index_scores import index_scores
        from .nki.mixes import mixes
        from .nki.sparse_attention import sparse_attention
        from .nki.top_k import top_k

        self._launch = launch
        self._sparse_attention, self._index_scores, self._top_k, self._mixes = sparse_attention, index_scores, top_k, mixes
        self._activation_qdq, self._active_experts = activation_qdq, active_experts

    def attend(
        self, q: Tensor, kv: Tensor, ring: str, far: Far | None, table: Tensor, sink: Tensor, window: int, state: State,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """attention.attend: a kernel call per sequence and stretch of rows."""
        call, tokens, before = state.call, q.shape[1], window - 1
        turned = rotate(q, table, arithmetic).to(arithmetic.dtype)
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
                out.append(self._attention(turned[row, part], near, near_idxs, kv[row, part], visible, sink, chosen))
        return rotate(torch.cat(out).unflatten(0, q.shape[:2]).float(), table, arithmetic, back=True)

    def attend_block(
        self, q: Tensor, kv: Tensor, ring: str, table: Tensor, sink: Tensor, window: int, state: State,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """attention.attend_block: a kernel call per sequence."""
        tokens = q.shape[1]
        turned = rotate(q, table, arithmetic).to(arithmetic.dtype)
        cache, slots = self._ring(ring, state, window)
        reached = state.call.start[:, None] + torch.arange(-window, tokens, device=q.device) >= 0
        out = [
            self._attention(turned[row], cache, slots[row], kv[row], reached[row].expand(tokens, -1), sink, None)
            for row in range(q.shape[0])
        ]
        return rotate(torch.stack(out).float(), table, arithmetic, back=True)

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
        self, q: Tensor, near: Tensor, near_idxs: Tensor, kv: Tensor, visible: Tensor, sink: Tensor,
        chosen: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """Queries [n, H, D] over rows of ``near`` by index, rows kv [m, D] and chosen ones; visible [n, indices + m]."""
        bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, HIDDEN)
        index = near_idxs.int().unsqueeze(-1)
        return self._launch(self._sparse_attention, q, near, index, kv.to(q.dtype), bias, sink.unsqueeze(-1), *(chosen or ()))

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

    def quantise(self, x: Tensor, arithmetic: "Arithmetic") -> Tensor:
        """linear.quantise: one kernel call for values that bf16 holds; PyTorch in fp32 numerics."""
        if arithmetic.dtype != torch.bfloat16:
            return TORCH.quantise(x, arithmetic)
        return self._launch(self._activation_qdq, x.flatten(0, -2).to(torch.bfloat16)).float().view(x.shape)

    def expert_rows(
        self, x: Tensor, ids: Tensor, routing: Tensor, bank: experts.Bank, shared: experts.Bank, limit: float,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """experts.expert_rows: kernel calls for a bank stored as fp8_exact, in release numerics. Other banks, and the shared
        expert, whose fp8 block scales no row scale replaces (docs/kernels.md, section 4), stay with PyTorch."""
        if bank.w13.places is None or arithmetic.dtype != torch.bfloat16:
            return experts.expert_rows(x, ids, routing, bank, shared, limit, arithmetic)
        one = routing.new_ones(1)
        always = torch.cat([experts.one_row(row, [0], one, shared, limit, arithmetic) for row in x.split(1)])
        return self._experts(x, ids, routing, bank, limit, arithmetic) + always

    def expert_by_expert(
        self, x: Tensor, ids: Tensor, routing: Tensor, bank: experts.Bank, shared: experts.Bank, limit: float,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """experts.expert_by_expert, in the same way."""
        if bank.w13.places is None or arithmetic.dtype != torch.bfloat16:
            return experts.expert_by_expert(x, ids, routing, bank, shared, limit, arithmetic)
        always = experts.one_expert(x, 0, None, shared, limit, arithmetic)
        return self._experts(x, ids, routing, bank, limit, arithmetic) + always

    def _experts(
        self, x: Tensor, ids: Tensor, routing: Tensor, bank: experts.Bank, limit: float, arithmetic: "Arithmetic"
    ) -> Tensor:
        """The chosen experts' sum [n, d]: a kernel call per stretch of rows.

        A whole expert runs on one core, since its result is rounded before the sum, a share of its columns on two. The bank
        is laid out for the kernel at every call; on a device that belongs to loading.
        """
        count, cores = bank.experts, 1 if bank.whole else 2
        packed = stack([pack(*exact_rows(bank.w13, bank.w2, expert), cores) for expert in range(count)])
        table = routing.new_zeros(x.shape[0], count + 1).scatter(1, ids, routing)[:, :count]
        rows = max(1, min(PARTITIONS, ROUTING // count))
        options = {"limit": limit, "quantize": arithmetic.quantize_activations, "round_experts": bank.whole, "cores": cores}
        out = [
            self._launch(self._active_experts, some, weights.T.contiguous(), *packed, **options)
            for some, weights in zip(x.to(torch.bfloat16).split(rows), table.split(rows), strict=True)
        ]
        return torch.cat(out)

    def mixes(
        self, raw: Tensor, x: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float, norm_eps: float,
        arithmetic: "Arithmetic",
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """hyper_connections.mixes: a kernel call per 128 rows."""
        streams = x.to(arithmetic.dtype).flatten(0, 1).flatten(1)
        parts = max(p for p in range(1, PARTITIONS + 1) if streams.shape[1] % p == 0)
        constants = {"rounds": rounds, "eps": eps, "norm_eps": norm_eps}
        found = [
            self._launch(self._mixes, some, rows.unflatten(1, (parts, -1)), scale.unsqueeze(0), base.unsqueeze(0), **constants)
            for some, rows in zip(raw.flatten(0, 1).split(PARTITIONS), streams.split(PARTITIONS), strict=True)
        ]
        pre, post, comb = (torch.cat(part).unflatten(0, x.shape[:2]) for part in zip(*found, strict=True))
        return pre, post, comb


def _visible(positions: Tensor, window: int) -> Tensor:
    """Which rows each of n consecutive positions sees of the ``window`` - 1 before the first and its own: bool [n, all]."""
    row = positions[0] + torch.arange(1 - window, positions.shape[0], device=positions.device)
    age = positions[:, None] - row
    return (age >= 0) & (age < window) & (row >= 0)
