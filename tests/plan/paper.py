# SPDX-License-Identifier: Apache-2.0
"""A checkpoint without files: what a configuration asks for, as tensors without data."""

import torch
from torch import Tensor

from modeling_deepseek_v41.checkpoint.spec import expected_tensors
from modeling_deepseek_v41.config import ModelConfig

DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "I8": torch.uint8,
}  # fmt: skip


class PaperCheckpoint:
    """Has what ``RankCheckpoint`` asks of a ``Checkpoint``; ``read`` collects the names of all tensors that were read."""

    def __init__(self, config: ModelConfig):
        self.tensors = expected_tensors(config)
        self.read: set[str] = set()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        self.read.add(name)
        spec = self.tensors[name]
        return torch.empty(stop - start, *spec.shape[1:], dtype=DTYPES[spec.dtype], device="meta")

    def tensor(self, name: str) -> Tensor:
        self.read.add(name)
        spec = self.tensors[name]
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")

    def mapped(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.rows(name, start, self.tensors[name].shape[0] if stop is None else stop)

    def linear(self, name: str, start: int, stop: int) -> Tensor:
        if f"{name}.scale" in self.tensors:
            self.read.add(f"{name}.scale")
        return self.rows(f"{name}.weight", start, stop).float()
