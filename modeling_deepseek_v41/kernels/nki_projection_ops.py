# SPDX-License-Identifier: Apache-2.0
"""The attention's projections as launches of NKI kernels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import projections
from ..projections import Part, Projected
from .nki_launch import CORES, MOST_ROWS, PARTITIONS, Launch
from .nki_linear_ops import columns_of, decodes

if TYPE_CHECKING:
    from ..numerics import Arithmetic

MOST_OF_X = 3
"""Weights of x as it is that ``query_projection`` takes."""
SIDE_BY_SIDE = (2, 3)
"""Weights that ``linears`` takes."""


class ProjectionKernels:
    """Fused where a kernel's limits hold, in decode in release numerics; else linears, norm and QDQ one by one.

    Rows of decode are always fused, 32 per call, so that a row's bits do not depend on how many run beside it.
    """

    def __init__(self, launch: Launch):
        from .nki.linears import linears
        from .nki.output_projection import output_projection
        from .nki.query_projection import query_projection

        self._launch, self._linears = launch, linears
        self._query_projection, self._output_projection = query_projection, output_projection

    def query_projection(
        self, x: Tensor, table: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, kv_norm: Tensor, eps: float,
        arithmetic: "Arithmetic", of_qr: Sequence[Tensor] = (), of_x: Sequence[tuple[Tensor, bool]] = (),
    ) -> Projected:  # fmt: skip
        """projections.query_projection of laid-out weights: fused, a kernel call per 32 rows, with a weight of qr and up to
        three of x beside the attention's, as index sources have."""
        k, low, plain = x.shape[-1], q_norm.shape[0], [weight for weight, _ in of_x]
        beside = len(of_qr) == min(len(of_x), 1) and len(of_x) <= MOST_OF_X
        caches = arithmetic.quantize_cache and _fits_slots(kv_norm.shape[0], table.shape[-1])
        if not beside or not caches or not _fits(x, k, low, (wq_a, wq_b, wkv, *of_qr, *plain), arithmetic):
            narrow = wq_a, q_norm, wq_b, wkv, kv_norm
            return projections.query_projection(x, table, *narrow, eps, arithmetic, of_qr, of_x)
        columns = *(columns_of(weight, low) for weight in (wq_b, *of_qr)), *(columns_of(weight, k) for weight in plain)
        options = {"columns": columns, "rounds": tuple(rounds for _, rounds in of_x), "eps": eps}
        options |= {"quantize": arithmetic.quantize_activations, "cores": CORES}
        weights = wq_a, q_norm.unsqueeze(0), wkv, kv_norm.unsqueeze(0), wq_b, *of_qr, *plain
        rows = zip(x.flatten(0, 1).bfloat16().split(MOST_ROWS), table.flatten(0, 1).split(MOST_ROWS), strict=True)
        found = [self._launch(self._query_projection, *some, *weights, **options) for some in rows]
        kv, *others = (torch.cat(part).unflatten(0, x.shape[:2]) for part in zip(*found, strict=True))
        q, *others = (one.float() for one in others)
        return Projected(q, kv, others[: len(of_qr)], others[len(of_qr) :])

    def output_projection(
        self, o: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int, part: Part | None, rounds: bool, arithmetic: "Arithmetic"
    ) -> Tensor:
        """projections.output_projection of laid-out weights: of one group of heads and all of its latent fused, a kernel call
        per 32 rows."""
        k = o.shape[2] * o.shape[3] // groups
        low = columns_of(wo_a, k) // groups
        if groups > 1 or part is not None or not _fits(o, k, low, (wo_a, wo_b), arithmetic):
            return projections.output_projection(o, wo_a, wo_b, groups, part, rounds, arithmetic)
        options = {"low": low, "columns": columns_of(wo_b, low), "rounds": rounds, "cores": CORES}
        options["quantize"] = arithmetic.quantize_activations
        rows = o.flatten(2).flatten(0, 1).bfloat16().split(MOST_ROWS)
        found = [self._launch(self._output_projection, some, wo_a, wo_b, **options) for some in rows]
        return torch.cat(found).float().unflatten(0, o.shape[:2])

    def quantised_linears(self, xs: Sequence[Tensor], weights: Sequence[Tensor], arithmetic: "Arithmetic") -> list[Tensor]:
        """projections.quantised_linears of laid-out weights: of two or three fused, a kernel call per 32 rows."""
        k = xs[0].shape[-1]
        if len(weights) not in SIDE_BY_SIDE or not decodes(xs[0], weights, arithmetic):
            return projections.quantised_linears(xs, weights, arithmetic)
        options = {"columns": tuple(columns_of(weight, k) for weight in weights), "cores": CORES}
        options["quantize"] = arithmetic.quantize_activations
        rows = torch.stack(list(xs)).flatten(1, 2).bfloat16().split(MOST_ROWS, 1)
        found = [self._launch(self._linears, some, *weights, **options) for some in rows]
        return [torch.cat(part).float().unflatten(0, xs[0].shape[:2]) for part in zip(*found, strict=True)]


def _fits_slots(dim: int, rotary: int) -> bool:
    """Whether window KV of ``dim`` columns fills whole slots of both cores, the last of which has all ``rotary`` columns."""
    return dim % (PARTITIONS * CORES) == 0 and rotary <= PARTITIONS


def _fits(x: Tensor, k: int, low: int, weights: tuple[Tensor, ...], arithmetic: "Arithmetic") -> bool:
    """Whether rows x [B, T, ...] are decode in release numerics, and ``k`` inputs and ``low`` outputs fill whole tiles."""
    whole = k % PARTITIONS == 0 and low % (PARTITIONS * CORES) == 0
    return whole and decodes(x, weights, arithmetic)
