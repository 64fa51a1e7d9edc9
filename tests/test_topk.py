# SPDX-License-Identifier: Apache-2.0
"""The one tie rule: higher score first, then lower position."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_deepseek_v41.topk import top_ascending, top_mask, top_positions

SCORES = st.sampled_from([-math.inf, -3.5, -1.0, -1e-30, -0.0, 0.0, 1e-30, 0.25, 1.0, 1.0000001, 3e38])


def best(scores: list[float], k: int) -> list[int]:
    """The k best positions by a plain sort; -0.0 == 0.0 in Python too."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_top_positions_is_a_sort_by_score_then_position(data: st.DataObject) -> None:
    scores = data.draw(st.lists(SCORES, min_size=1, max_size=24))
    k = data.draw(st.integers(1, len(scores)))
    assert top_positions(torch.tensor(scores), k).tolist() == best(scores, k)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_top_ascending_is_the_best_visible_in_order_then_minus_one(data: st.DataObject) -> None:
    scores = data.draw(st.lists(SCORES.filter(math.isfinite), min_size=1, max_size=24))
    visible = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    k = data.draw(st.integers(1, 30))
    seen = [i for i in range(len(scores)) if visible[i]]
    chosen = sorted(seen[i] for i in best([scores[i] for i in seen], k))
    expected = chosen + [-1] * (k - len(chosen))
    assert top_ascending(torch.tensor(scores), torch.tensor(visible), k).tolist() == expected


def test_equal_scores_take_the_lower_positions() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0], [0.0] * 5])
    assert top_positions(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert top_ascending(scores, torch.ones(2, 5, dtype=torch.bool), 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]


def test_none_of_nothing() -> None:
    nothing = torch.empty(2, 3, 0)
    assert top_mask(nothing, 0).shape == nothing.shape
    assert top_ascending(nothing, nothing > 0, 4).tolist() == [[[-1] * 4] * 3] * 2


def test_minus_zero_is_zero() -> None:
    assert top_positions(torch.tensor([-0.0, 0.0, -0.0, 0.0]), 4).tolist() == [0, 1, 2, 3]
    assert top_positions(torch.tensor([-1e-45, -0.0, 0.0, 1e-45]), 4).tolist() == [3, 1, 2, 0]


def test_infinities_rank_at_the_ends() -> None:
    assert top_positions(torch.tensor([-math.inf, math.inf, 0.0, math.inf, -math.inf]), 5).tolist() == [1, 3, 2, 0, 4]


def test_minus_infinity_is_chosen_only_where_it_is_visible() -> None:
    scores = torch.tensor([-math.inf, 1.0, -math.inf])
    assert top_ascending(scores, torch.tensor([True, True, True]), 2).tolist() == [0, 1]
    assert top_ascending(scores, torch.tensor([False, True, False]), 2).tolist() == [1, -1]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_fewer_than_k_are_padded_with_minus_one(k: int) -> None:
    scores = torch.randn(2, 3)
    none = top_ascending(scores, torch.zeros(2, 3, dtype=torch.bool), k)
    assert (none == -1).all() and none.shape == (2, k)
    every = top_ascending(scores, torch.ones(2, 3, dtype=torch.bool), k)
    assert (every >= 0).sum(-1).tolist() == [min(k, 3)] * 2
    assert (every[:, 3:] == -1).all()


def test_hidden_scores_do_not_matter_even_where_they_are_nan() -> None:
    visible = torch.tensor([True, False, True, False])
    scores = torch.tensor([0.5, math.nan, 0.25, math.inf])
    assert top_ascending(scores, visible, 4).tolist() == [0, 2, -1, -1]


def test_bf16_scores_and_padded_batches_give_the_same_rows() -> None:
    scores = torch.randn(4, 7, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = top_positions(scores, 9)
    assert torch.equal(whole, top_positions(scores.float(), 9))
    for row in range(4):
        assert torch.equal(whole[row : row + 1, 2:3], top_positions(scores[row : row + 1, 2:3], 9))


def test_positions_are_exact_for_the_longest_rows() -> None:
    scores = torch.zeros(1, 1 << 20)
    scores[0, -3:] = torch.tensor([-1.0, 1.0, 1.0])
    assert top_positions(scores, 4)[0].tolist() == [(1 << 20) - 2, (1 << 20) - 1, 0, 1]
