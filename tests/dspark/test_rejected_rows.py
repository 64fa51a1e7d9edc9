# SPDX-License-Identifier: Apache-2.0
"""What a rejected token wrote is overwritten or unreadable: poisoned after every step, it changes no bit.

Which entries these are is observed, not assumed: those that a step changed and that its accepted rows alone, run from the
same state, do not change. Steps verify 6, 2 and 4 rows in turn, so that entries of rejected rows outlive the next step. The
sabotages show that the test notices: an accepted entry of any state, and any rule that would let a rejected one be read.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from speculating import RANK, Embed, Head, Scripted, Session, plain, scripts
from torch import Tensor

from modeling_deepseek_v41.dspark.drafter import Drafter, Drafts
from modeling_deepseek_v41.dspark.step import read_prompt
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import State, allocate, make_call

DRAFTS = (5, 1, 3, 5, 1, 5, 3, 1)
"""Drafts of every step."""

STATES = ["swa.0", "swa.7", "ckv.2", "ckv.4", "ikey.2", "ikey.4", "craw.2", "tok", "mtp.swa.0", "mtp.swa.2"]
_plain: dict[tuple[DeepseekV41Model, int], Tensor] = {}


class Guided:
    """The checkpoint's drafter, whose ids are replaced by a script's: its logits show what it reads, whatever is accepted."""

    def __init__(self, drafter: Drafter, script: Scripted, ahead: int = 0):
        self.drafter, self.script, self.ahead = drafter, script, ahead

    def update(self, taps: Tensor, state: State) -> None:
        self.drafter.update(taps, state)

    def propose(
        self, token: Tensor, rank: Tensor, state: State, embed: Embed, head: Head, num_draft_tokens: int, *drawing: object
    ) -> Drafts:
        """``ahead``: how many positions too far the drafter believes to be."""
        call = state.call
        moved = make_call(call.start + self.ahead, call.length, call.slot, call.positions.shape[1], call.read_len)
        view = State(list(state.tensors), tuple(state.tensors.values()), moved)
        own = self.drafter.propose(token, rank, view, embed, head, num_draft_tokens)
        return own._replace(ids=self.script.propose(token, rank, state, embed, head, num_draft_tokens).ids)


@dataclasses.dataclass
class Taken:
    """One step that a session has made."""

    session: Session
    before: list[Tensor]
    """The state before it."""
    ids: Tensor
    """[B, k + 1] the verified tokens."""
    start: Tensor
    counts: Tensor
    """[B] accepted rows."""

    def states(self) -> list[tuple[str, Tensor, Tensor]]:
        """Every state's name, and it before and after the step, [slots, rows, ...]: index keys have their groups last."""
        names = self.session.model.state_names
        pairs = zip(names, self.before, self.session.state, strict=True)
        return [(name, old.mT, new.mT) if name.startswith("ikey.") else (name, old, new) for name, old, new in pairs]


Mark = Callable[[Taken], None]


def session_of(model: DeepseekV41Model, prompts: list[Tensor], ahead: int = 0) -> Session:
    """A session with garbage as its state, whose drafts are right but for every third position."""
    for prompt in prompts:
        if (model, prompt.numel()) not in _plain:
            _plain[model, prompt.numel()] = plain(model, prompt, sum(DRAFTS) + len(DRAFTS) + 1)
    answers = [_plain[model, prompt.numel()] for prompt in prompts]
    assert model.drafter is not None
    session = Session(model, len(prompts), Guided(model.drafter, scripts(model, prompts, answers, "every third"), ahead))
    for state in session.state:
        state.fill_(garbage(state))
    return session


def run(session: Session, prompts: list[Tensor], *marks: Mark) -> list[Tensor]:
    """Speculative steps behind ``prompts``: every step's tokens, drafts and the logits of the rows that count.

    Each of ``marks`` sees every step after it was made, and may poison state.
    """
    rows = len(prompts)
    token = torch.stack([session.read(prompt, slot=slot).argmax() for slot, prompt in enumerate(prompts)])
    start, out, rejected = torch.tensor([prompt.numel() for prompt in prompts]), [], 0
    for k in DRAFTS:
        before = [state.clone() for state in session.state]
        step = session.step(token, start, torch.full((rows,), k + 1), torch.arange(rows), k)
        out += [step.tokens, step.drafts.logits, step.drafts.confidence]
        out += [step.logits[row, : step.counts[row]] for row in range(rows)]
        taken = Taken(session, before, torch.cat([token.unsqueeze(1), step.drafts.ids], 1), start, step.counts)
        for mark in marks:
            mark(taken)
        rejected += int((k + 1 - step.counts).sum())
        token, start = step.next_token, step.next_start
    assert rejected > len(DRAFTS), "rows are rejected"
    return out


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether two runs agree to the bit, and have no NaN."""
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def garbage(state: Tensor) -> float:
    return torch.nan if state.is_floating_point() else torch.iinfo(state.dtype).max


def changed(old: Tensor, new: Tensor) -> Tensor:
    """Which rows [slots, rows] of [slots, rows, ...] differ in any bit."""
    different = (old != new) & ~(old.isnan() & new.isnan())
    return different.reshape(*old.shape[:2], -1).any(-1)


class Overwritten(AssertionError):
    """A rejected row destroyed what an accepted one of the same step had written."""


class Poison:
    """Makes garbage of what rejected rows alone have written, and of the spare rows."""

    def __init__(self) -> None:
        self.poisoned: dict[str, int] = {}
        """Entries by state."""

    def __call__(self, taken: Taken) -> None:
        for (name, old, new), (_, _, alone) in zip(taken.states(), accepted_alone(taken).states(), strict=True):
            accepted = changed(old, alone)
            accepted[:, -1] = False  # the spare row, where padding is written
            if changed(alone, new)[accepted].any():
                raise Overwritten(f"{name}: a rejected row changed an accepted one's entry")
            rejected = changed(old, new) & ~accepted
            self.poisoned[name] = self.poisoned.get(name, 0) + int(rejected[:, :-1].sum())
            rejected[:, -1] = True
            new[rejected] = garbage(new)


@torch.inference_mode()
def accepted_alone(taken: Taken) -> Taken:
    """The same step with the rejected rows left out."""
    session = Session(taken.session.model, len(taken.start), taken.session.drafter)
    session.state = [state.clone() for state in taken.before]
    where = (taken.start, taken.counts, torch.arange(len(taken.start)), RANK)
    read_prompt(session.model, session.drafter, taken.ids, *where, *session.state, read_len=session.model.max_seq_len)
    return dataclasses.replace(taken, session=session)


@pytest.mark.parametrize("numerics", ["fp32", "release"])
def test_poison_in_rejected_entries_changes_nothing(model: DeepseekV41Model, prompts: list[Tensor]) -> None:
    """Prompts of 1 token to several windows, in one batch; every state is poisoned many times."""
    poison, prompts = Poison(), prompts[::2]
    expected = run(session_of(model, prompts), prompts)
    tokens = torch.cat(expected[:: 3 + len(prompts)], 1)
    for row, prompt in zip(tokens, prompts, strict=True):
        found = row[row >= 0]
        assert torch.equal(found, _plain[model, prompt.numel()][1 : 1 + len(found)]), "the text of plain decoding"
    assert same(run(session_of(model, prompts), prompts, poison), expected)
    assert list(poison.poisoned) == model.state_names and min(poison.poisoned.values()) > len(DRAFTS), poison.poisoned


@pytest.mark.parametrize("numerics", ["fp32"])
@pytest.mark.parametrize("name", STATES)
def test_poison_in_an_accepted_entry_shows(model: DeepseekV41Model, prompts: list[Tensor], name: str) -> None:
    """The newest accepted row, or group, of one state."""

    def spoil(taken: Taken) -> None:
        (state,) = (new for other, _, new in taken.states() if other == name)
        kind, _, layer = name.partition(".")
        newest = taken.start + taken.counts - 1
        if kind in ("ckv", "ikey"):
            newest = (newest + 1) // model.config.compress_ratios[int(layer)] - 1
        else:
            newest = newest % (state.shape[1] - 1)
        state[torch.arange(len(newest)), newest] = garbage(state)

    prompts = prompts[2:4]
    expected = run(session_of(model, prompts), prompts)
    assert not same(run(session_of(model, prompts), prompts, spoil), expected)


def poison_shows(model: DeepseekV41Model, prompts: list[Tensor], prepare: Callable[[Session], None], ahead: int = 0) -> bool:
    """Whether poison changes what a session says that ``prepare`` has made wrong, or finds no entry that it may poison."""
    outputs = []
    for marks in ([], [Poison()]):
        session = session_of(model, prompts, ahead)
        prepare(session)
        try:
            outputs.append(run(session, prompts, *marks))
        except Overwritten:
            return True
    return not same(*outputs)


@pytest.mark.parametrize("numerics", ["fp32"])
@pytest.mark.parametrize("kind", ["swa.", "mtp.swa.", "craw.", "tok"])
def test_a_ring_without_slack_shows(model: DeepseekV41Model, prompts: list[Tensor], kind: str) -> None:
    """Rings of just the rows that are read: rejected rows overwrite what the next step needs."""
    window, grams = model.config.sliding_window, model.config.engram_max_ngram_size
    rows = {"swa.": window, "mtp.swa.": window, "craw.": 2, "tok": grams - 1}[kind]

    def tighten(session: Session) -> None:
        spec = session.model.state_spec(len(prompts))
        short = [
            dataclasses.replace(entry, shape=(entry.shape[0], rows + 1, *entry.shape[2:]))
            if entry.name.startswith(kind) else entry for entry in spec
        ]  # fmt: skip
        session.state = allocate(short)

    assert poison_shows(model, prompts[2:], tighten)


@pytest.mark.parametrize("numerics", ["fp32"])
def test_a_drafter_one_position_ahead_shows(model: DeepseekV41Model, prompts: list[Tensor]) -> None:
    """Its window holds the position of the newest token, where a rejected row may stand."""
    assert poison_shows(model, prompts[2:4], lambda session: None, ahead=1)


def test_a_group_too_many_shows(folder: Path, prompts: list[Tensor]) -> None:
    """Index sources that may choose one group more than is complete."""
    model = load_model(folder, "fp32", progress=False, drafter=True)

    def see_more(module: Any, args: Any) -> Any:
        return *args[:4], args[4]._replace(reach=args[4].reach + module.ratio), args[5]

    for layer in model.config.index_source_layer_ids:
        model.blocks[layer].attn.indexer.register_forward_pre_hook(see_more)
    assert poison_shows(model, prompts[2:4], lambda session: None)
