# SPDX-License-Identifier: Apache-2.0
"""In decode and verification a row's bits do not depend on the rows beside it; nothing depends on the future."""

import pytest
import torch
from driving import Session, largest_error, tokens
from torch import Tensor

from modeling_deepseek_v41.model import DeepseekV41Model

NUMERICS = pytest.mark.parametrize("numerics", ["release", "fp32"])
PREFIX = 23
STEPS = 3
BATCHES = (2, 3, 4, 8)


def prefilled(model: DeepseekV41Model, slots: int, seed: int) -> tuple[Session, list[int]]:
    """Slot 0 holds the first PREFIX tokens of sequence 0; the others hold other sequences of other lengths."""
    session = Session(model, slots)
    lengths = [PREFIX] + [1 + (7 * slot + 5 * seed) % 40 for slot in range(1, slots)]
    for slot, length in enumerate(lengths):
        session.call(tokens(model, length, seed=100 * seed * (slot > 0) + slot)[None], [0], slot=[slot])
    return session, lengths


def decode(model: DeepseekV41Model, session: Session, lengths: list[int], rows: list[int], width: int, seed: int) -> Tensor:
    """STEPS calls of ``width`` tokens for the slots ``rows``; the logits of slot 0 [STEPS * width, vocab]."""
    found = []
    mine = tokens(model, STEPS * width, seed=77)
    for step in range(STEPS):
        others = tokens(model, len(rows) * width, seed=1000 * seed + step).view(len(rows), width)
        others[rows.index(0)] = mine[step * width : (step + 1) * width]
        start = [lengths[slot] + step * width for slot in rows]
        found.append(session.call(others, start, slot=rows)[rows.index(0)])
    return torch.cat(found)


def assert_same_bits(one: Session, other: Session) -> None:
    """Equal state of slot 0."""
    state = other.slot_state(0)
    for name, tensor in one.slot_state(0).items():
        assert torch.equal(tensor, state[name]), name


@NUMERICS
@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(model: DeepseekV41Model, width: int, batch: int) -> None:
    alone, lengths = prefilled(model, 1, seed=0)
    expected = decode(model, alone, lengths, [0], width, seed=0)
    for seed in (1, 2):
        beside, lengths = prefilled(model, batch, seed)
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)).tolist()
        assert torch.equal(decode(model, beside, lengths, order, width, seed), expected)
        assert_same_bits(beside, alone)


@NUMERICS
def test_inactive_and_padded_neighbours_change_no_bit(model: DeepseekV41Model) -> None:
    alone, lengths = prefilled(model, 1, seed=0)
    expected = decode(model, alone, lengths, [0], 1, seed=0)
    beside, _ = prefilled(model, 3, seed=1)
    mine = tokens(model, STEPS, seed=77)
    for step in range(STEPS):
        ids = torch.stack([mine[step : step + 1], torch.tensor([3]), torch.tensor([5])])
        found = beside.call(ids, [PREFIX + step, 0, 9], length=[1, 1, 0], slot=[0, -1, 2])
        assert torch.equal(found[0, 0], expected[step])
    assert_same_bits(beside, alone)


@NUMERICS
def test_six_rows_of_verification_have_the_bits_of_six_decode_steps(model: DeepseekV41Model) -> None:
    width = model.config.dspark_block_size + 1
    ids = tokens(model, 4 * width, seed=3)
    steps, blocks = Session(model), Session(model)
    expected = steps.chunks(ids, [1] * len(ids))
    assert torch.equal(blocks.chunks(ids, [width] * 4), expected)
    assert_same_bits(blocks, steps)


@NUMERICS
def test_rejected_drafts_leave_no_trace(model: DeepseekV41Model) -> None:
    width = model.config.dspark_block_size + 1
    ids, wrong = tokens(model, 60, seed=4), tokens(model, 60, seed=5)
    plain, drafting = Session(model), Session(model)
    expected = plain.chunks(ids, [20] + [1] * 40)
    drafting.chunks(ids[:20], [20])
    at = 20
    for accepted in (0, 1, 2, 3, 4, 5, 0, 0, 5, 2):
        block = torch.cat([ids[at : at + 1 + accepted], wrong[at + 1 + accepted : at + width]])
        found = drafting.call(block[None], [at])[0, : accepted + 1]
        assert torch.equal(found, expected[at : at + accepted + 1])
        at += accepted + 1


@NUMERICS
@pytest.mark.parametrize("position", range(5))
def test_a_row_of_verification_does_not_see_the_next(model: DeepseekV41Model, position: int) -> None:
    ids = tokens(model, 29, seed=6)
    changed = other_token_at(model, ids, 23 + position + 1)
    one, other = Session(model).chunks(ids, [23, 6]), Session(model).chunks(changed, [23, 6])
    assert torch.equal(one[: 23 + position + 1], other[: 23 + position + 1])
    assert not torch.equal(one[23 + position + 1], other[23 + position + 1])


@pytest.mark.parametrize("numerics", ["fp32_no_qdq"])
@pytest.mark.parametrize("position", [20, 21, 38, 39])
def test_a_row_of_a_prompt_does_not_see_the_next(model: DeepseekV41Model, position: int) -> None:
    """Not to the bit: the experts' products have as many rows as tokens chose the expert, and a library's sums follow that."""
    ids = tokens(model, 48, seed=6)
    changed = other_token_at(model, ids, position + 1)
    one, other = Session(model).call(ids[None], [0])[0], Session(model).call(changed[None], [0])[0]
    assert largest_error(one[: position + 1], other[: position + 1]) < 2e-6
    assert largest_error(one[position + 1], other[position + 1]) > 1e-3


def other_token_at(model: DeepseekV41Model, ids: Tensor, position: int) -> Tensor:
    """``ids`` with another token at ``position``."""
    changed = ids.clone()
    changed[position] = (ids[position] + 1) % model.config.vocab_size
    return changed
