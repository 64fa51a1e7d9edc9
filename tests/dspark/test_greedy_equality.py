# SPDX-License-Identifier: Apache-2.0
"""Greedy text with speculation is greedy text without, token for token, whatever the drafter says.

Release numerics round to bf16 and fp8, so a bit of difference between one row and six would soon be another token: rows of
a call of at most block + 1 tokens are computed one by one, and ``test_verified_rows_have_the_bits_of_decode`` shows it.
"""

import pytest
import torch
from speculating import Session, plain, scripts, speculative
from torch import Tensor

from modeling_deepseek_v41.model import DeepseekV41Model

NUMERICS = pytest.mark.parametrize(("numerics", "kernels"), [("fp32", "auto"), ("release", "auto")])
ALL = pytest.mark.parametrize(
    ("numerics", "kernels"), [(numerics, kernels) for numerics in ("fp32", "release") for kernels in ("torch", "auto")]
)
TOKENS = 14
_plain: dict[tuple[int, int], Tensor] = {}


@pytest.fixture
def answers(model: DeepseekV41Model, prompts: list[Tensor]) -> list[Tensor]:
    """What plain decoding says to every prompt."""
    for prompt in prompts:
        if (id(model), prompt.numel()) not in _plain:
            _plain[id(model), prompt.numel()] = plain(model, prompt, TOKENS)
    return [_plain[id(model), prompt.numel()] for prompt in prompts]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for row, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.tolist() == want[: got.numel()].tolist(), f"row {row}"


@NUMERICS
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_the_drafter_of_the_checkpoint(model: DeepseekV41Model, prompts: list[Tensor], answers: list[Tensor], k: int) -> None:
    counts = [TOKENS, TOKENS - 1, TOKENS, TOKENS - 7, TOKENS]  # rows stop at different times
    found, _ = speculative(model, prompts, counts, k)
    assert [row.numel() for row in found] == counts
    assert_same(found, answers)


@NUMERICS
@pytest.mark.parametrize(("kind", "k"), [("right", 5), ("right", 2), ("wrong", 3), ("random", 5), ("every third", 4)])
def test_any_drafter(model: DeepseekV41Model, prompts: list[Tensor], answers: list[Tensor], kind: str, k: int) -> None:
    prompts, answers = prompts[::2], answers[::2]
    found, steps = speculative(model, prompts, TOKENS, k, scripts(model, prompts, answers, kind))
    assert_same(found, answers)
    if kind == "right":
        assert steps == -(-(TOKENS - 1) // (k + 1))
    if kind == "wrong":
        assert steps == TOKENS - 1


@pytest.mark.parametrize(("numerics", "kernels"), [("release", "torch"), ("fp32", "torch")])
def test_without_compiled_operations(model: DeepseekV41Model, prompts: list[Tensor], answers: list[Tensor]) -> None:
    prompts, answers = prompts[1:4], answers[1:4]
    assert_same(speculative(model, prompts, TOKENS, 5, scripts(model, prompts, answers, "every third"))[0], answers)


@NUMERICS
def test_a_row_does_not_depend_on_its_neighbours(model: DeepseekV41Model, prompts: list[Tensor], answers: list[Tensor]) -> None:
    together, alone = Session(model, 3), Session(model)
    chosen = [0, 2, 3]
    for slot, row in enumerate(chosen):
        together.read(prompts[row], slot=slot)
    token = torch.stack([answers[row][0] for row in chosen])
    start = torch.tensor([prompts[row].numel() for row in chosen])
    both = together.step(token, start, torch.tensor([6, 3, 6]), torch.arange(3), 5)
    for slot, row in enumerate(chosen):
        alone.read(prompts[row])
        one = alone.step(token[slot : slot + 1], start[slot : slot + 1], torch.tensor([6]), torch.tensor([0]), 5)
        real = 3 if slot == 1 else 6
        assert torch.equal(both.logits[slot, :real], one.logits[0, :real])
        assert torch.equal(both.drafts.logits[slot], one.drafts.logits[0])
        assert torch.equal(both.drafts.confidence[slot], one.drafts.confidence[0])


@ALL
def test_verified_rows_have_the_bits_of_decode(model: DeepseekV41Model, prompts: list[Tensor], answers: list[Tensor]) -> None:
    """Six rows at once and one after another: a matrix library that sums six rows in another order would show here."""
    for prompt, answer in zip(prompts, answers, strict=True):
        session, single = Session(model, 1, scripts(model, [prompt], [answer], "right")), Session(model)
        session.read(prompt)
        single.read(prompt)
        start = prompt.numel()
        step = session.step(answer[:1], torch.tensor([start]), torch.tensor([6]), torch.tensor([0]), 5)
        rows = [single.read(answer[i : i + 1], start + i) for i in range(6)]
        assert torch.equal(step.logits[0], torch.stack(rows))


def poison(session: Session, accepted: Tensor, verified: Tensor, slot: Tensor) -> None:
    """Garbage in every state row that belongs to a position from ``accepted`` on and before ``verified``, both [B]."""
    config = session.model.config
    for name, state in zip(session.model.state_names, session.state, strict=True):
        kind, _, layer = name.partition(".")
        garbage = torch.nan if state.is_floating_point() else torch.iinfo(state.dtype).max
        rows = state.mT if kind == "ikey" else state
        for row in range(slot.numel()):
            if slot[row] < 0:
                continue
            first, stop = int(accepted[row]), int(verified[row])
            if kind in ("ckv", "ikey"):
                ratio = config.compress_ratios[int(layer)]
                places = torch.arange(first // ratio, stop // ratio)
            else:
                places = torch.arange(first, stop) % (state.shape[1] - 1)
            rows[slot[row], places] = garbage


def poison_everything(session: Session) -> None:
    """Garbage in all of the state."""
    for state in session.state:
        state.fill_(torch.nan if state.is_floating_point() else torch.iinfo(state.dtype).max)


@NUMERICS
@pytest.mark.parametrize("kind", ["drafter", "every third"])
def test_rejected_rows_are_never_read(model: DeepseekV41Model, prompts: list[Tensor], answers: list[Tensor], kind: str) -> None:
    """State begins as NaN, and what rejected rows wrote becomes NaN after every step."""
    prompts, answers = prompts[::2], answers[::2]
    drafter = None if kind == "drafter" else scripts(model, prompts, answers, kind)
    found, steps = speculative(model, prompts, TOKENS, 5, drafter, after=poison, before=poison_everything)
    assert_same(found, answers)
    clean, clean_steps = speculative(model, prompts, TOKENS, 5, drafter)
    assert_same(found, clean)
    assert steps == clean_steps, "poisoned drafts would be accepted less often"


@NUMERICS
def test_up_to_the_last_position(model: DeepseekV41Model, prompts: list[Tensor]) -> None:
    """The context's end: ``length`` keeps verification within it, while the drafter's block reaches behind."""
    room = 9
    prompt = torch.cat([prompts[4], prompts[4], prompts[3]])[: model.max_seq_len - room]
    expected = plain(model, prompt, room + 1)
    for k in (2, 5):
        assert_same(speculative(model, [prompt], room + 1, k)[0], [expected])
    right = scripts(model, [prompt], [expected], "right")
    assert_same(speculative(model, [prompt], room + 1, 5, right)[0], [expected])
