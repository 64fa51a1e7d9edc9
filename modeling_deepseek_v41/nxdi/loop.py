# SPDX-License-Identifier: Apache-2.0
"""Generating for several sequences at once through the application's own forward, plain or with DSpark.

NxDI's generation adapter takes one sequence at a time where it speculates; this small loop is for batches and for serving.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..sampling import greedy

if TYPE_CHECKING:
    from .application import NeuronDeepseekV41ForCausalLM


def generate_batch(
    application: "NeuronDeepseekV41ForCausalLM",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Greedy continuations of ``prompts``, sequence i in state slot i, without the prompt and with the end token.

    A sequence that has ended takes no part in the calls behind. Loaded or on the CPU alike.
    """
    rows = [_Row(list(prompt), max_new_tokens, frozenset(eos_token_ids)) for prompt in prompts]
    longest = max(len(row.prompt) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.prompt)] = torch.tensor(row.prompt)
    lengths = torch.tensor([len(row.prompt) for row in rows])
    mask = (torch.arange(longest) < lengths.unsqueeze(1)).long()
    positions = torch.arange(longest).expand(len(rows), -1)
    for row, new in zip(rows, forward(application, ids, mask, positions, torch.arange(len(rows))), strict=True):
        row.take(new)
    while running := [index for index, row in enumerate(rows) if not row.is_done]:
        newest = torch.tensor([[rows[index].tokens[-1]] for index in running])
        at = torch.tensor([[rows[index].position] for index in running])
        mask = (torch.arange(int(at.max())) < at).long()
        for index, new in zip(running, forward(application, newest, mask, at, torch.tensor(running)), strict=True):
            rows[index].take(new)
    return [row.tokens for row in rows]


def forward(
    application: "NeuronDeepseekV41ForCausalLM", ids: Tensor, mask: Tensor, positions: Tensor, slots: Tensor
) -> list[list[int]]:
    """One call of the application: ids and positions [B, T], mask [B, positions known], slots [B]; every row's new tokens."""
    found = application(input_ids=ids, attention_mask=mask, position_ids=positions, seq_ids=slots)
    if application.neuron_config.enable_fused_speculation:
        return [[token for token in row if token >= 0] for row in found.fused_outputs[0].tolist()]
    tokens = found.tokens if application.on_device_sampling else greedy(found.logits[:, -1])
    return [[token] for token in tokens.tolist()]


class _Row:
    def __init__(self, prompt: list[int], limit: int, ends: frozenset[int]):
        self.prompt, self.limit, self.ends = prompt, limit, ends
        self.tokens: list[int] = []

    @property
    def position(self) -> int:
        """Of the newest token."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.limit or bool(self.tokens and self.tokens[-1] in self.ends)

    def take(self, new: list[int]) -> None:
        for token in new:
            if not self.is_done:
                self.tokens.append(token)
