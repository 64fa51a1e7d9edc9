# SPDX-License-Identifier: Apache-2.0
"""Random fp4 experts as a checkpoint stores them, and banks that are loaded from them."""

import numpy as np
import torch
from torch import Tensor

from modeling_deepseek_v41.expert_bank import ExpertBank, ExpertStorage
from modeling_deepseek_v41.numerics import Arithmetic


class StoredExperts:
    """What a bank reads: experts.{e}.{w1,w2,w3}.{weight,scale} with every code, and scales of 2^-6 to 2^-3.

    ``wide``: rows of w1, of w2 and of w3 that are too wide for one fp8 scale, their first group being 2^-20 of what it was.
    """

    def __init__(self, experts: int, d: int, inter: int, seed: int = 0, wide: dict[str, list[tuple[int, int]]] | None = None):
        rng = np.random.default_rng(seed)
        self.tensors: dict[str, Tensor] = {}
        for expert in range(experts):
            for part, n, k in (("w1", inter, d), ("w3", inter, d), ("w2", d, inter)):
                scale = rng.integers(121, 125, (n, k // 32)).astype(np.uint8)
                for e, row in (wide or {}).get(part, []):
                    if e == expert:
                        scale[row, 0] -= 20
                self.tensors[f"experts.{expert}.{part}.weight"] = torch.from_numpy(
                    rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
                )
                self.tensors[f"experts.{expert}.{part}.scale"] = torch.from_numpy(scale)

    def tensor(self, name: str) -> Tensor:
        """As ``Checkpoint.tensor``."""
        return self.tensors[name]

    def mapped(self, name: str) -> Tensor:
        """As ``Checkpoint.mapped``."""
        return self.tensors[name]

    def linear(self, name: str, start: int, stop: int) -> Tensor:
        """As ``Checkpoint.linear``; no bank asks for it."""
        raise NotImplementedError


def bank(a: Arithmetic, stored: StoredExperts, storage: str, exception_rows: int | None = None) -> ExpertBank:
    """``stored``, kept as ``storage``."""
    experts, inter = len(stored.tensors) // 6, stored.tensors["experts.0.w1.weight"].shape[0]
    d = stored.tensors["experts.0.w2.weight"].shape[0]
    made = ExpertBank(experts, d, inter, a, ExpertStorage(storage, exception_rows))
    made.load(stored, "experts")
    return made
