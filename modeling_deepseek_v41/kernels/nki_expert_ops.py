# SPDX-License-Identifier: Apache-2.0
"""A layer's experts as launches of NKI kernels."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..experts import Bank, routing_table
from .nki_launch import PARTITIONS, Launch
from .nki_linear_ops import LinearKernels
from .nki_row_ops import RowKernels

if TYPE_CHECKING:
    from ..numerics import Arithmetic

ROUTING = 8192
"""Rows times experts per kernel call: 32 KiB of routing weights in every partition."""


class ExpertKernels:
    """Banks are laid out as nki_layout.py does at load. Which experts are read is not decided on the host."""

    def __init__(self, launch: Launch, linears: LinearKernels, rows: RowKernels):
        from .nki.experts import active_experts

        self._launch, self._active_experts = launch, active_experts
        self._linears, self._rows = linears, rows

    def experts(
        self, x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Bank, limit: float, arithmetic: "Arithmetic"
    ) -> Tensor:
        """experts.every_expert. A bank kept as fp8_exact takes the fused kernel, which reads the chosen experts alone; of one
        kept in bf16, and where a row does not fit fp8, every expert is three kernel calls: two linears, SwiGLU between."""
        rows, table = x.to(arithmetic.dtype), routing_table(ids, routing, bank.experts)
        out = self._one(rows, shared.w13.rows[0], shared.w2.rows[0], None, shared, limit, arithmetic) * shared.share
        if bank.w13.places is None:
            return self._each(out, rows, table, bank.w13.rows, bank.w2.rows, bank, limit, arithmetic)
        unfit = bank.w13.places.long()
        out = out + self._fused(rows, table.index_fill(1, unfit, 0.0), bank, limit, arithmetic)
        if bank.w13.exceptions is None or bank.w2.exceptions is None:
            return out
        return self._each(out, rows, table[:, unfit], bank.w13.exceptions, bank.w2.exceptions, bank, limit, arithmetic)

    def _each(
        self, out: Tensor, rows: Tensor, table: Tensor, w13: Tensor, w2: Tensor, bank: Bank, limit: float,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """``out`` [m, d] and the experts w13, w2 [E, ...] of all rows, weighted with table [m, E], added up."""
        for own13, own2, weights in zip(w13, w2, table.unbind(1), strict=True):
            out = out + self._one(rows, own13, own2, weights.unsqueeze(1), bank, limit, arithmetic)
        return out

    def _one(
        self, rows: Tensor, w13: Tensor, w2: Tensor, routing: Tensor | None, bank: Bank, limit: float,
        arithmetic: "Arithmetic",
    ) -> Tensor:  # fmt: skip
        """One expert of rows [m, d], weighted with routing [m, 1] or not: [m, d] fp32, rounded where the bank is whole."""
        gate_up = self._linears.product(rows, w13, arithmetic.rounds)
        h = self._rows.hidden(gate_up, routing, limit=limit, quantize=arithmetic.quantize_activations)
        return self._linears.product(h, w2, bank.whole and arithmetic.rounds).float()

    def _fused(self, rows: Tensor, table: Tensor, bank: Bank, limit: float, arithmetic: "Arithmetic") -> Tensor:
        """The sum [m, d] fp32 of the experts with weights in table [m, E]: a kernel call per stretch of rows.

        A whole expert runs on one core, since its result is rounded before the sum, a share of its columns on two.
        """
        stretch = max(1, min(PARTITIONS, ROUTING // bank.experts))
        options = {"limit": limit, "quantize": arithmetic.quantize_activations, "round_experts": bank.whole}
        weights, cores = (bank.w13.rows, bank.w2.rows), 1 if bank.whole else 2
        out = [
            self._launch(self._active_experts, some, own.T.contiguous(), *weights, cores=cores, **options)
            for some, own in zip(rows.split(stretch), table.split(stretch), strict=True)
        ]
        return torch.cat(out)
