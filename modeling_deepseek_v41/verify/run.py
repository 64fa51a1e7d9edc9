# SPDX-License-Identifier: Apache-2.0
"""The model under test, fed with a golden prompt and the golden's own generated ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..dspark.drafter import Drafter, Drafts
from ..model import DeepseekV41Model
from ..state import State, allocate, make_call
from .golden_set import Prompt
from .parts import engrams


class Run(NamedTuple):
    """What the model gives for one prompt."""

    logits: Tensor
    """[B, N, vocab] fp32."""
    hashes: Tensor | None
    """[B, L + N - 1, engram layers, columns] table rows as the layers looked them up; None without engram layers."""
    drafts: Drafts | None
    """Of N steps, each field [B, N, ...], ids with the step's own token before them; None without a drafter."""


@torch.inference_mode()
def teacher_forced(model: DeepseekV41Model, prompt: Prompt, rows: int | None = None, drafter: Drafter | None = None) -> Run:
    """One prefill of the whole prompt, then N - 1 decode steps, each fed with the golden's id; B sequences side by side.

    ``rows``: stop after so many rows of logits (default: N). ``drafter``: the model's, where it is to see every call's taps,
    or those that ``prompt`` has, and to draft a whole block behind each, with the golden's next id as the newest token.
    """
    batch, steps = prompt.generated.shape
    steps = steps if rows is None else min(rows, steps)
    state = allocate(model.state_spec(batch))
    slot, rank = torch.arange(batch), model.parallel.rank_tensor()
    read_len = prompt.length + steps - 1
    with looked_up_rows(model) as found:
        logits, proposed = [], []
        for step in range(steps):
            ids = prompt.generated[:, step - 1 : step] if step else prompt.input_ids
            start = torch.full((batch,), prompt.length + step - 1 if step else 0)
            length = torch.full((batch,), ids.shape[1])
            hidden, taps, *_ = model(ids, start, length, slot, rank, *state, read_len=read_len)
            logits.append(model.logits(hidden[:, -1:])[:, 0])
            if drafter is not None:
                stop = prompt.length + step
                taps = taps if prompt.taps is None else prompt.taps[:, stop - ids.shape[1] : stop].float()
                learn(model, drafter, taps, start, slot, state)
                proposed.append(propose(model, drafter, prompt.generated[:, step], start + ids.shape[1], slot, state))
    hashes = torch.stack([torch.cat(rows, 1) for rows in found.values()], 2) if found else None
    return Run(torch.stack(logits, 1), hashes, _stacked(proposed) if proposed else None)


def learn(model: DeepseekV41Model, drafter: Drafter, taps: Tensor, start: Tensor, slot: Tensor, state: list[Tensor]) -> None:
    """Shows the ``taps`` [B, T, targets * d] of the model's call at ``start`` [B] to its drafter."""
    drafter.update(taps, _view(model, start, slot, taps.shape[1], state))


def propose(
    model: DeepseekV41Model, drafter: Drafter, token: Tensor, start: Tensor, slot: Tensor, state: list[Tensor]
) -> Drafts:
    """A block of greedy drafts behind ``token`` [B] at position ``start`` [B]; ids [B, k + 1] with ``token`` before them."""
    block, rank = model.config.dspark_block_size, model.parallel.rank_tensor()
    drafts = drafter.propose(token, rank, _view(model, start, slot, block, state), model.embed, model.logits, block)
    return drafts._replace(ids=torch.cat([token.unsqueeze(1), drafts.ids], 1))


def _view(model: DeepseekV41Model, start: Tensor, slot: Tensor, tokens: int, state: list[Tensor]) -> State:
    call = make_call(start, torch.full_like(start, tokens), slot, tokens, model.max_seq_len)
    return State(model.state_names, tuple(state), call)


def _stacked(steps: list[Drafts]) -> Drafts:
    """Drafts of N steps, each [B, ...], as one [B, N, ...]."""

    def field(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in steps], 1)

    return Drafts(field("ids"), field("logits"), None, field("confidence"))


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
