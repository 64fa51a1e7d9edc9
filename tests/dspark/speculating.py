# SPDX-License-Identifier: Apache-2.0
"""Plain and speculative generation as an engine drives them, with the state in view, and drafters that need no weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from modeling_deepseek_v41.dspark.drafter import Drafts
from modeling_deepseek_v41.dspark.step import Proposer, Step, read_prompt, speculative_step
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import State, allocate, make_call

RANK = torch.zeros(1, dtype=torch.int64)
Embed = Callable[[Tensor, Tensor], Tensor]
Head = Callable[[Tensor], Tensor]


class Session:
    """A model with its drafter and state for ``slots`` sequences."""

    def __init__(self, model: DeepseekV41Model, slots: int = 1, drafter: Proposer | None = None):
        self.model = model
        self.drafter: Proposer = model.drafter if drafter is None else drafter  # type: ignore[assignment]
        self.state = allocate(model.state_spec(slots))

    def view(self, start: Tensor, length: Tensor, slot: Tensor, tokens: int) -> State:
        """The state as a call of ``tokens`` tokens sees it."""
        call = make_call(start, length, slot, tokens, self.model.max_seq_len)
        return State(self.model.state_names, tuple(self.state), call)

    @torch.inference_mode()
    def read(self, ids: Tensor, start: int = 0, slot: int = 0) -> Tensor:
        """Prompt tokens ids [T] into backbone and drafter; the last one's logits [vocab]."""
        where = (torch.tensor([start]), torch.tensor([ids.numel()]), torch.tensor([slot]), RANK)
        hidden, *_ = read_prompt(
            self.model, self.drafter, ids.unsqueeze(0), *where, *self.state, read_len=self.model.max_seq_len
        )
        return self.model.logits(hidden[:, -1:])[0, 0]

    @torch.inference_mode()
    def learn(self, taps: Tensor, start: int, slot: int = 0) -> None:
        """taps [T, targets * d] of positions from ``start`` on into the drafter alone."""
        count = taps.shape[0]
        view = self.view(torch.tensor([start]), torch.tensor([count]), torch.tensor([slot]), count)
        self.drafter.update(taps.unsqueeze(0), view)

    @torch.inference_mode()
    def propose(self, token: Tensor, start: int, count: int | None = None, slot: int = 0) -> Drafts:
        """Greedy drafts after ``token`` [] at position ``start``."""
        assert self.model.drafter is not None
        block = self.model.config.dspark_block_size
        view = self.view(torch.tensor([start]), torch.tensor([block]), torch.tensor([slot]), block)
        count = block if count is None else count
        return self.model.drafter.propose(token.view(1), RANK, view, self.model.embed, self.model.logits, count)

    @torch.inference_mode()
    def step(self, token: Tensor, start: Tensor, length: Tensor, slot: Tensor, k: int, **options: object) -> Step:
        """One speculative step of rows [B]."""
        step, _ = speculative_step(
            self.model, self.drafter, token, start, length, slot, RANK, self.state,
            num_draft_tokens=k, read_len=self.model.max_seq_len, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return step


def plain(model: DeepseekV41Model, prompt: Tensor, count: int) -> Tensor:
    """``count`` greedy tokens behind ``prompt`` [T], one at a time: [count]."""
    session, ids, start, out = Session(model), prompt, 0, []
    for _ in range(count):
        token = session.read(ids, start).argmax()
        out.append(token)
        ids, start = token.view(1), start + ids.numel()
    return torch.stack(out)


def speculative(
    model: DeepseekV41Model,
    prompts: list[Tensor],
    count: int | list[int],
    k: int,
    drafter: Proposer | None = None,
    after: Callable[[Session, Tensor, Tensor, Tensor], None] | None = None,
    before: Callable[[Session], None] | None = None,
) -> tuple[list[Tensor], int]:
    """``count`` greedy tokens behind every one of ``prompts``, all in one batch, and how many steps that took.

    A row that has its tokens stays in the batch as an inactive one. ``after(session, position behind the accepted rows,
    position behind the verified rows, slot)`` runs behind every step, ``before`` at the start.
    """
    rows = len(prompts)
    wanted = torch.tensor([count] * rows if isinstance(count, int) else count)
    session = Session(model, rows, drafter)
    if before is not None:
        before(session)
    token = torch.stack([session.read(prompt, slot=slot).argmax() for slot, prompt in enumerate(prompts)])
    out = [[first.item()] for first in token]
    start = torch.tensor([prompt.numel() for prompt in prompts])
    steps = 0
    while (missing := wanted - torch.tensor([len(row) for row in out])).any():
        length = missing.clamp(0, k + 1)
        slot = torch.where(length > 0, torch.arange(rows), -1)
        step = session.step(token, start, length, slot, k)
        if after is not None:
            after(session, step.next_start, start + length, slot)
        for row in range(rows):
            new = step.tokens[row, : step.counts[row]]
            assert (new >= 0).all() and (step.tokens[row, step.counts[row] :] == -1).all()
            out[row] += new.tolist()
        token = torch.where(slot >= 0, step.next_token, token)
        start = step.next_start
        steps += 1
    return [torch.tensor(row) for row in out], steps


class Scripted:
    """Drafts that are known beforehand: ``script`` [slots, positions] is what it says stands at every position."""

    def __init__(self, model: DeepseekV41Model, script: Tensor):
        self.script, self.vocab = script, model.config.vocab_size

    def update(self, taps: Tensor, state: State) -> None:
        """Nothing to learn."""

    def propose(
        self, token: Tensor, rank: Tensor, state: State, embed: Embed, head: Head, num_draft_tokens: int, *drawing: object
    ) -> Drafts:
        """The script behind every row's newest token."""
        at = state.call.start[:, None] + 1 + torch.arange(num_draft_tokens)
        ids = self.script[state.call.slot.clamp_min(0)[:, None], at.clamp_max(self.script.shape[1] - 1)]
        return Drafts(ids, torch.zeros(*ids.shape, self.vocab), None, torch.zeros(ids.shape))


def scripts(model: DeepseekV41Model, prompts: list[Tensor], answers: list[Tensor], kind: str) -> Scripted:
    """A drafter that is always ``right``, always ``wrong``, ``random`` or right at ``every third`` position not."""
    vocab = model.config.vocab_size
    script = torch.zeros(len(prompts), model.max_seq_len, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        script[row, prompt.numel() : prompt.numel() + answer.numel()] = answer
    places = torch.arange(model.max_seq_len)
    if kind == "wrong":
        script = (script + 1) % vocab
    elif kind == "random":
        script = torch.randint(vocab, script.shape, generator=torch.Generator().manual_seed(5))
    elif kind == "every third":
        script = torch.where(places % 3 == 2, (script + 1) % vocab, script)
    return Scripted(model, script)
