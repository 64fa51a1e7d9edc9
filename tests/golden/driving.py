# SPDX-License-Identifier: Apache-2.0
"""Calls of a model as an engine makes them, with all logits and the state in view."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import allocate

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a"
"""The golden set, its checkpoint in the folder ckpt."""

HAS_NUMBA = importlib.util.find_spec("numba") is not None
KERNELS = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed"))]
)


class Session:
    """A model with its state for ``slots`` sequences."""

    def __init__(self, model: DeepseekV41Model, slots: int = 1):
        self.model = model
        self.state = allocate(model.state_spec(slots))

    @torch.inference_mode()
    def call(self, ids: Tensor, start: list[int], length: list[int] | None = None, slot: list[int] | None = None) -> Tensor:
        """ids [B, T] at ``start``; by default all tokens are real and row b is in slot b. Logits [B, T, vocab]."""
        batch, tokens = ids.shape
        length = [tokens] * batch if length is None else length
        slot = list(range(batch)) if slot is None else slot
        rank = torch.zeros(1, dtype=torch.int64)
        rows = (torch.tensor(start), torch.tensor(length), torch.tensor(slot), rank)
        hidden, *_ = self.model(ids, *rows, *self.state, read_len=self.model.max_seq_len)
        return self.model.logits(hidden)

    def chunks(self, ids: Tensor, sizes: list[int], start: int = 0, slot: int = 0) -> Tensor:
        """ids [T] in calls of ``sizes``, which add up to T; logits [T, vocab]."""
        parts, at = [], start
        for part in ids.split(sizes):
            parts.append(self.call(part.unsqueeze(0), [at], slot=[slot])[0])
            at += part.numel()
        return torch.cat(parts)

    def slot_state(self, slot: int) -> dict[str, Tensor]:
        """What the sequence in ``slot`` owns: every state without the last row, which takes the rows nobody wants."""
        owned = {}
        for name, tensor in zip(self.model.state_names, self.state, strict=True):
            owned[name] = tensor[slot, :, :-1] if name.startswith("ikey.") else tensor[slot, :-1]
        return owned


def tokens(model: DeepseekV41Model, count: int, seed: int = 0) -> Tensor:
    """``count`` ids of the whole vocabulary."""
    return torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest over rows of max|found - expected| / max|expected|; infinity where ``found`` is not finite."""
    error = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    return error.nan_to_num(nan=torch.inf).max().item()
