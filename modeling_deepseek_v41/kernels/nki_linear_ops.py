# SPDX-License-Identifier: Apache-2.0
"""Linears and the QDQ before them, and of caches, as launches of NKI kernels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .nki_launch import CORES, PARTITIONS, Launch

if TYPE_CHECKING:
    from ..numerics import Arithmetic


class LinearKernels:
    """Weights are laid out as nki_layout.py does at load: [C, min(k, 128), ceil(k / 128) * n / C], C cores."""

    def __init__(self, launch: Launch):
        from .nki.activation_qdq import activation_qdq
        from .nki.compressed_qdq import compressed_qdq
        from .nki.group_qdq import group_qdq
        from .nki.linear import linear
        from .nki.linears import grouped_linear

        self._launch, self._linear, self._grouped_linear = launch, linear, grouped_linear
        self._activation_qdq, self._group_qdq, self._compressed_qdq = activation_qdq, group_qdq, compressed_qdq

    def product(self, x: Tensor, weight: Tensor, rounds: bool) -> Tensor:
        """x [m, k] times a laid-out weight: [m, n] bf16 where it ``rounds``, else fp32. One kernel call."""
        columns, cores = columns_of(weight, x.shape[1]), weight.shape[0]
        return self._launch(self._linear, x, weight, columns=columns, rounds=rounds, cores=cores)

    def linear(self, x: Tensor, weight: Tensor, rounds: bool, arithmetic: "Arithmetic") -> Tensor:
        """rows.linear of a laid-out weight: one kernel call."""
        y = self.product(x.flatten(0, -2).to(arithmetic.dtype), weight, rounds and arithmetic.rounds)
        return y.float().unflatten(0, x.shape[:-1])

    def grouped(self, x: Tensor, weight: Tensor, arithmetic: "Arithmetic") -> Tensor:
        """rows.grouped of laid-out weights, the groups in front: one kernel call, in fp32 one per group."""
        rows = x.flatten(0, 1).to(arithmetic.dtype)
        if weight.shape[0] == 1 or not arithmetic.rounds:
            found = [self.product(rows[:, group], own, arithmetic.rounds) for group, own in enumerate(weight)]
            return torch.stack(found, 1).float().unflatten(0, x.shape[:2])
        columns, cores = columns_of(weight[0], x.shape[-1]), weight.shape[1]
        return self._launch(self._grouped_linear, rows, weight, columns=columns, cores=cores).float().unflatten(0, x.shape[:2])

    def quantise(self, x: Tensor, arithmetic: "Arithmetic") -> Tensor:
        """linear.quantise: one kernel call, another one for values that bf16 does not hold."""
        rows = x.flatten(0, -2)
        if arithmetic.rounds:
            return self._launch(self._activation_qdq, rows.to(torch.bfloat16)).float().view(x.shape)
        return self._launch(self._group_qdq, rows, fp4=False).view(x.shape)

    def quantise_index(self, x: Tensor) -> Tensor:
        """formats.qdq_fp4_ue8m0: one kernel call."""
        return self._launch(self._group_qdq, x.flatten(0, -2), fp4=True).view(x.shape)

    def quantise_compressed(self, x: Tensor) -> Tensor:
        """formats.qdq_fp4_e4m3: one kernel call."""
        return self._launch(self._compressed_qdq, x.flatten(0, -2)).view(x.shape)


def columns_of(weight: Tensor, k: int) -> int:
    """n of a laid-out weight of contraction ``k``."""
    cores, _, width = weight.shape
    return cores * width // -(-k // PARTITIONS)


def decodes(x: Tensor, weights: Sequence[Tensor], arithmetic: "Arithmetic") -> bool:
    """Whether rows x [B, T, ...] are decode in release numerics, and every weight is laid out for both cores."""
    return arithmetic.rounds and x.shape[1] <= arithmetic.exact_tokens and all(one.shape[0] == CORES for one in weights)
