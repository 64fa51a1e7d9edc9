# SPDX-License-Identifier: Apache-2.0
"""One sequence, however it is cut into calls, gives the same logits.

Without any QDQ two ways differ by the order of fp32 sums alone: 1e-5 is ten times that. With QDQ of the caches a value
at a rounding boundary may fall to the other side, which moves the rows behind it by up to 1e-2.
"""

import pytest
import torch
from driving import Session, largest_error, tokens
from torch import Tensor

from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.verify.compare import relative_error

WINDOW = 16
LENGTH = 3 * WINDOW + 5
SPLITS = (1, 2, 3, 6, 7, 15, 16, 17, 18, 31, 33, 47, 52)
CHUNKS = (2, 3, 5, 7, 15, 16, 17)
UNROUNDED = pytest.mark.parametrize("numerics", ["fp32_no_qdq"])
BOTH = pytest.mark.parametrize("numerics", ["fp32_no_qdq", "fp32"])


def assert_same(found: Tensor, expected: Tensor, numerics: str) -> None:
    """The same greedy ids; 1e-5, in fp32 up to the first QDQ flip and 1e-2 behind it."""
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    errors = relative_error(found, expected)
    assert errors.max() <= (1e-5 if numerics == "fp32_no_qdq" else 1e-2)
    assert (errors <= 1e-5).float().mean() > 0.5, "a flip is rare: most rows are not behind one"


def one_shot(model: DeepseekV41Model, ids: Tensor) -> Tensor:
    return Session(model).call(ids.unsqueeze(0), [0])[0]


@BOTH
def test_token_by_token_is_one_shot(model: DeepseekV41Model, numerics: str) -> None:
    ids = tokens(model, LENGTH)
    assert_same(Session(model).chunks(ids, [1] * LENGTH), one_shot(model, ids), numerics)


@UNROUNDED
@pytest.mark.parametrize("split", SPLITS)
def test_a_prompt_in_two_chunks_is_one_shot(model: DeepseekV41Model, numerics: str, split: int) -> None:
    ids = tokens(model, LENGTH)
    assert_same(Session(model).chunks(ids, [split, LENGTH - split]), one_shot(model, ids), numerics)


@BOTH
@pytest.mark.slow
@pytest.mark.parametrize("split", range(1, LENGTH))
def test_a_prompt_split_anywhere_is_one_shot(model: DeepseekV41Model, numerics: str, split: int) -> None:
    ids = tokens(model, LENGTH)
    assert_same(Session(model).chunks(ids, [split, LENGTH - split]), one_shot(model, ids), numerics)


@BOTH
@pytest.mark.parametrize("size", CHUNKS)
def test_chunks_of_one_size_are_one_shot(model: DeepseekV41Model, numerics: str, size: int) -> None:
    ids = tokens(model, LENGTH)
    sizes = [size] * (LENGTH // size) + ([LENGTH % size] if LENGTH % size else [])
    assert_same(Session(model).chunks(ids, sizes), one_shot(model, ids), numerics)


@BOTH
@pytest.mark.parametrize("lengths", [(1, 2, 3, 7, 15, 16, 17, 33, 48)])
def test_prompts_of_a_length_give_the_last_row_of_token_by_token(
    model: DeepseekV41Model, numerics: str, lengths: tuple[int, ...]
) -> None:
    _check_prompts(model, numerics, lengths)


@BOTH
@pytest.mark.slow
def test_prompts_of_every_length_give_the_last_row_of_token_by_token(model: DeepseekV41Model, numerics: str) -> None:
    _check_prompts(model, numerics, tuple(range(1, 3 * WINDOW + 1)))


def _check_prompts(model: DeepseekV41Model, numerics: str, lengths: tuple[int, ...]) -> None:
    ids = tokens(model, max(lengths), seed=1)
    expected = Session(model).chunks(ids, [1] * len(ids))
    found = torch.stack([one_shot(model, ids[:length])[-1] for length in lengths])
    assert_same(found, expected[[length - 1 for length in lengths]], numerics)


@BOTH
def test_padding_does_not_change_a_prompt(model: DeepseekV41Model, numerics: str) -> None:
    ids = tokens(model, 21)
    padded = torch.cat([ids, torch.full((11,), 7)])
    session = Session(model)
    found = session.call(padded.unsqueeze(0), [0], length=[21])[0, :21]
    assert_same(found, one_shot(model, ids), numerics)
    more = tokens(model, 3, seed=5)
    expected = one_shot(model, torch.cat([ids, more]))[21:]
    assert_same(session.chunks(more, [1, 1, 1], start=21), expected, numerics)


@BOTH
def test_rows_of_unequal_length_position_and_slot_are_the_rows_alone(model: DeepseekV41Model, numerics: str) -> None:
    before, lengths, slots = [0, 19, 34], [20, 7, 13], [2, 0, 3]
    sequences = [tokens(model, before[row] + lengths[row], seed=row) for row in range(3)]
    session = Session(model, slots=4)
    for row, first in enumerate(before):
        if first:
            session.call(sequences[row][None, :first], [0], slot=[slots[row]])
    ids = torch.zeros(3, max(lengths), dtype=torch.int64)
    for row, (first, length) in enumerate(zip(before, lengths, strict=True)):
        ids[row, :length] = sequences[row][first:]
    found = session.call(ids, before, lengths, slots)
    for row, (first, length) in enumerate(zip(before, lengths, strict=True)):
        assert_same(found[row, :length], one_shot(model, sequences[row])[first:], numerics)


@UNROUNDED
def test_a_needle_in_the_first_chunk_is_seen_from_the_last(model: DeepseekV41Model, numerics: str) -> None:
    ids = tokens(model, LENGTH)
    changed = ids.clone()
    changed[3] = (ids[3] + 1) % model.config.vocab_size
    sizes = [WINDOW, WINDOW, LENGTH - 2 * WINDOW]
    with_needle, without = Session(model).chunks(changed, sizes), Session(model).chunks(ids, sizes)
    assert_same(with_needle, one_shot(model, changed), numerics)
    assert largest_error(with_needle[-1:], without[-1:]) > 1e-4
