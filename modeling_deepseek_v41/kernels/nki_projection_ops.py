# SPDX-License-Identifier: Apache-2.0
"""The attention's projections as launches of NKI kernels."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import projections
from ..projections import Part
from .nki_launch import PARTITIONS, Launch
from .nki_linear_ops import columns_of

if TYPE_CHECKING:
    from ..numerics import Arithmetic

CORES, MOST_ROWS = 2, 32
"""Of the fused kernels: cores, and rows per call (kernels/nki/low_rank.py)."""


class ProjectionKernels:
    """Fused where a kernel's limits hold, in decode in release numerics; else linears, norm and QDQ one by one.

    Rows of decode are always fused, 32 per call, so that a row's bits do not depend on how many run beside it.
    """

    def __init__(self, launch: Launch):
        from .nki.output_projection import output_projection
        from .nki.query_projection import query_projection

        self._launch, self._query_projection, self._output_projection = launch, query_projection, output_projection

    def query_projection(
        self, x: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, eps: float, arithmetic: "Arithmetic"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """projections.query_projection of laid-out weights: fused, a kernel call per 32 rows."""
        low, weights = q_norm.shape[0], (wq_a, q_norm.unsqueeze(0), wq_b, wkv)
        if not _fits(x, x.shape[-1], low, (wq_a, wq_b, wkv), arithmetic):
            return projections.query_projection(x, wq_a, q_norm, wq_b, wkv, eps, arithmetic)
        sizes = {"low": low, "columns": columns_of(wq_b, low), "dim": columns_of(wkv, x.shape[-1])}
        options = sizes | {"eps": eps, "quantize": arithmetic.quantize_activations, "cores": CORES}
        rows = x.flatten(0, 1).bfloat16().split(MOST_ROWS)
        found = [self._launch(self._query_projection, some, *weights, **options) for some in rows]
        q, qr, kv = (torch.cat(part).float().unflatten(0, x.shape[:2]) for part in zip(*found, strict=True))
        return q, qr, kv

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


def _fits(x: Tensor, k: int, low: int, weights: tuple[Tensor, ...], arithmetic: "Arithmetic") -> bool:
    """Whether rows x [B, T, ...] are decode in release numerics, and ``k`` inputs and ``low`` outputs fill whole tiles."""
    decode = arithmetic.rounds and x.shape[1] <= arithmetic.exact_tokens
    whole = k % PARTITIONS == 0 and low % (PARTITIONS * CORES) == 0
    return decode and whole and all(weight.shape[0] == CORES for weight in weights)
