# SPDX-License-Identifier: Apache-2.0
"""A layer's experts as launches of NKI kernels."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import moe
from ..experts import Bank, routing_table
from .nki_launch import BANK, CORES, MOST_ROWS, PARTITIONS, Launch
from .nki_linear_ops import LinearKernels, columns_of, decodes
from .nki_row_ops import RowKernels

if TYPE_CHECKING:
    from ..numerics import Arithmetic

SLOTS, GROUP = 4, 32
"""Of the fused router and shared expert: slots that experts and columns are spread over (kernels/nki/slots.py), and columns
of a group of the QDQ."""
ROUTING = 8192
"""Rows times experts per kernel call: 32 KiB of routing weights in every partition."""


class ExpertKernels:
    """Banks are laid out as nki_layout.py does at load. Which experts are read is not decided on the host."""

    def __init__(self, launch: Launch, linears: LinearKernels, rows: RowKernels):
        from .nki.experts import active_experts
        from .nki.route_and_share import route_and_share

        self._launch, self._active_experts, self._route_and_share = launch, active_experts, route_and_share
        self._linears, self._rows = linears, rows

    def experts(
        self, x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Tensor, limit: float, arithmetic: "Arithmetic"
    ) -> Tensor:
        """experts.every_expert. A bank kept as fp8_exact takes the fused kernel, which reads the chosen experts alone; of one
        kept in bf16, and where a row does not fit fp8, every expert is three kernel calls: two linears, SwiGLU between."""
        rows, table, out = x.to(arithmetic.dtype), routing_table(ids, routing, bank.experts), shared
        if bank.w13.places is None:
            return self._each(out, rows, table, bank.w13.rows, bank.w2.rows, bank, limit, arithmetic)
        unfit = bank.w13.places.long()
        out = out + self._fused(rows, table.index_fill(1, unfit, 0.0), bank, limit, arithmetic)
        if bank.w13.exceptions is None or bank.w2.exceptions is None:
            return out
        return self._each(out, rows, table[:, unfit], bank.w13.exceptions, bank.w2.exceptions, bank, limit, arithmetic)

    def route_and_share(
        self, x: Tensor, weight: Tensor, bias: Tensor, k: int, normalises: bool, factor: float, shared: Bank, limit: float,
        arithmetic: "Arithmetic",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """moe.route_and_share: in decode in release numerics, beside a part of the shared expert, a kernel call per 32 rows;
        else router, QDQ and shared expert one by one."""
        if not _fits(x, weight, bias, shared, arithmetic):
            return moe.route_and_share(x, weight, bias, k, normalises, factor, shared, limit, arithmetic)
        w13, w2 = shared.w13.rows[0], shared.w2.rows[0]
        weights, columns = (weight, bias.unsqueeze(0), w13, w2), columns_of(w13, x.shape[2]) // 2
        options = {"columns": columns, "k": k, "normalises": normalises, "factor": factor, "limit": limit, "cores": CORES}
        rows = x.flatten(0, 1).bfloat16().split(MOST_ROWS)
        found = [self._launch(self._route_and_share, some, *weights, **options) for some in rows]
        ids, routing, quantised, y = (torch.cat(part).unflatten(0, x.shape[:2]) for part in zip(*found, strict=True))
        return ids.long(), routing, quantised.float(), y * shared.share

    def shared_expert(self, x: Tensor, shared: Bank, limit: float, arithmetic: "Arithmetic") -> Tensor:
        """experts.shared_expert: three kernel calls."""
        rows = x.flatten(0, 1).to(arithmetic.dtype)
        y = self._one(rows, shared.w13.rows[0], shared.w2.rows[0], None, shared, limit, arithmetic) * shared.share
        return y.view(x.shape)

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


def _fits(x: Tensor, weight: Tensor, bias: Tensor, shared: Bank, arithmetic: "Arithmetic") -> bool:
    """Whether rows x [B, T, d] are decode in release numerics, and the laid-out weights are what the fused kernel takes."""
    w13, w2 = shared.w13.rows[0], shared.w2.rows[0]
    decode = arithmetic.quantize_activations and decodes(x, (weight, w13, w2), arithmetic)
    if not decode or shared.whole or x.shape[2] % (CORES * PARTITIONS):
        return False
    experts, columns = bias.shape[0], columns_of(w13, x.shape[2]) // 2
    whole = experts % (CORES * SLOTS) == 0 and columns % GROUP == 0
    return whole and experts <= CORES * BANK and columns <= SLOTS * PARTITIONS
