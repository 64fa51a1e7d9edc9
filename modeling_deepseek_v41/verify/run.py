# SPDX-License-Identifier: Apache-2.0
"""The model under test, fed with a golden prompt and the golden's own generated ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..model import DeepseekV41Model
from ..state import allocate
from .golden_set import Prompt
from .parts import engrams


class Run(NamedTuple):
    """What the model gives for one prompt."""

    logits: Tensor
    """[B, N, vocab] fp32."""
    hashes: Tensor | None
    """[B, L + N - 1, engram layers, columns] table rows as the layers looked them up; None without engram layers."""


@torch.inference_mode()
def teacher_forced(model: DeepseekV41Model, prompt: Prompt, rows: int | None = None) -> Run:
    """One prefill of the whole prompt, then N - 1 decode steps, each fed with the golden's id; B sequences side by side.

    ``rows``: stop after so many rows of logits (default: N).
    """
    batch, steps = prompt.generated.shape
    steps = steps if rows is None else min(rows, steps)
    state = allocate(model.state_spec(batch))
    slot, rank = torch.arange(batch), model.parallel.rank_tensor()
    read_len = prompt.length + steps - 1
    with looked_up_rows(model) as found:
        logits = []
        for step in range(steps):
            ids = prompt.generated[:, step - 1 : step] if step else prompt.input_ids
            start = torch.full((batch,), prompt.length + step - 1 if step else 0)
            length = torch.full((batch,), ids.shape[1])
            hidden, *_ = model(ids, start, length, slot, rank, *state, read_len=read_len)
            logits.append(model.logits(hidden[:, -1:])[:, 0])
    hashes = torch.stack([torch.cat(rows, 1) for rows in found.values()], 2) if found else None
    return Run(torch.stack(logits, 1), hashes)


@contextmanager
def looked_up_rows(model: DeepseekV41Model) -> Iterator[dict[int, list[Tensor]]]:
    """Collects the table rows [B, T, columns] that each engram layer looks up, call after call."""
    rows: dict[int, list[Tensor]] = {layer: [] for layer in model.config.engram_layer_ids}
    handles = []
    for layer, engram in engrams(model).items():
        collect = rows[layer].append
        handles.append(engram.embed.register_forward_pre_hook(lambda module, args, collect=collect: collect(args[0])))
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
