# SPDX-License-Identifier: Apache-2.0
"""Reading a prompt and one speculative step, each as one static function of tensors (docs/model.md, sections 9 and 10).

A step drafts k tokens, verifies k + 1 rows in the backbone as one call, keeps what is accepted and shows all verified rows
to the drafter. Nothing is rolled back: state is addressed by position, what rejected rows wrote lies behind every position
that is read until the next step overwrites it. The backbone computes every verified row by itself, as in plain decoding
(rows.py), so a token is the one that plain decoding gives, to the bit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..model import DeepseekV41Model
from ..state import State, make_call
from .acceptance import accept_greedy, accept_sampled
from .choice import Choice
from .drafter import Drafts


class Proposer(Protocol):
    """What a step asks of a drafter; the contract is ``Drafter``'s."""

    def update(self, taps: Tensor, state: State) -> None: ...

    def propose(
        self, token: Tensor, rank: Tensor, state: State, embed: Callable[[Tensor, Tensor], Tensor],
        head: Callable[[Tensor], Tensor], num_draft_tokens: int, choice: Choice | None = None, uniforms: Tensor | None = None,
    ) -> Drafts: ...  # fmt: skip


class Step(NamedTuple):
    """What one step gives for B rows of k drafts each."""

    tokens: Tensor
    """[B, k + 1] int64: the new tokens, -1 behind the last one."""
    counts: Tensor
    """[B] int64: how many there are, 1 to k + 1 in an active row."""
    next_token: Tensor
    """[B] int64: the last of them, with which the next step begins."""
    next_start: Tensor
    """[B] int64: its position."""
    logits: Tensor
    """[B, k + 1, vocab] fp32: the backbone's, row i behind i accepted drafts."""
    drafts: Drafts


def read_prompt(
    model: DeepseekV41Model, drafter: Proposer | None, ids: Tensor, start: Tensor, length: Tensor, slot: Tensor, rank: Tensor,
    *state: Tensor, read_len: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``DeepseekV41Model.forward`` on tokens that the drafter, if there is one, sees too: (hidden [B, T, d], *state)."""
    hidden, taps, *state_out = model(ids, start, length, slot, rank, *state, read_len=read_len)
    if drafter is not None:
        call = make_call(start, length, slot, ids.shape[1], read_len)
        drafter.update(taps, State(model.state_names, tuple(state_out), call))
    return hidden, *state_out


def draft_and_verify(
    model: DeepseekV41Model, drafter: Proposer, token: Tensor, start: Tensor, length: Tensor, slot: Tensor, rank: Tensor,
    state: Sequence[Tensor], *, num_draft_tokens: int, read_len: int, choice: Choice | None = None,
    uniforms: Tensor | None = None,
) -> tuple[Drafts, Tensor, list[Tensor]]:  # fmt: skip
    """The k drafts behind ``token`` [B] and the backbone's logits [B, k + 1, vocab] fp32 behind 0 to k of them.

    ``token``, ``start``, ``length``, ``slot`` and ``read_len`` as in ``speculative_step``. Drafts are greedy, or with
    ``choice`` drawn with ``uniforms`` [B, k]. State, updated in place and returned, holds ``token`` and the drafts.
    """
    k, block = num_draft_tokens, model.config.dspark_block_size
    tensors = tuple(state)
    ahead = State(model.state_names, tensors, make_call(start, length.new_full(length.shape, block), slot, block, read_len))
    drafts = drafter.propose(token, rank, ahead, model.embed, model.logits, k, choice, uniforms)
    ids = torch.cat([token.unsqueeze(1), drafts.ids], 1)
    hidden, *state_out = read_prompt(model, drafter, ids, start, length, slot, rank, *tensors, read_len=read_len)
    return drafts, model.logits(hidden), state_out


def speculative_step(
    model: DeepseekV41Model, drafter: Proposer, token: Tensor, start: Tensor, length: Tensor, slot: Tensor, rank: Tensor,
    state: Sequence[Tensor], *, num_draft_tokens: int, read_len: int, choice: Choice | None = None,
    uniforms: Tensor | None = None, sampled_drafts: bool = False,
) -> tuple[Step, list[Tensor]]:  # fmt: skip
    """``token`` [B] int64, the newest of every sequence and not yet in its state, at position ``start`` [B].

    ``length`` [B]: rows to verify and so the most new tokens, 1 to k + 1; it keeps a sequence within its limit; 0 in
    inactive rows (slot -1). Without ``choice`` all rows are greedy. With it ``uniforms`` [B, 2k + 1] in [0, 1): k to
    draw drafts (``sampled_drafts``; else drafts are greedy and these are not used), k to accept, 1 for the last token.
    ``read_len``: at least max(start + length). Works at once after ``read_prompt``. State is updated in place.
    """
    k = num_draft_tokens
    drawing = (choice, uniforms[:, :k]) if sampled_drafts and uniforms is not None else (None, None)
    drafts, logits, state_out = draft_and_verify(
        model, drafter, token, start, length, slot, rank, state,
        num_draft_tokens=k, read_len=read_len, choice=drawing[0], uniforms=drawing[1],
    )  # fmt: skip
    if choice is None or uniforms is None:
        tokens, counts = accept_greedy(drafts.ids, logits, length)
    else:
        target = choice.probabilities(logits)
        tokens, counts = accept_sampled(drafts.ids, drafts.probabilities, target, uniforms[:, k:], length)
    last = tokens.gather(1, (counts - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
    return Step(tokens, counts, last, start + counts, logits, drafts), state_out
