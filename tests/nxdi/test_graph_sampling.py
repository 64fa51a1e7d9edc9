# SPDX-License-Identifier: Apache-2.0
"""In-graph sampling: over all random numbers, tokens come as often as the host's sampling says; ties by lower id."""

import pytest
import torch

from modeling_deepseek_v41.nxdi.graph_sampling import NUMBERS, draw
from modeling_deepseek_v41.sampling import probabilities

COUNT = 1 << 12
EVENLY = torch.arange(COUNT, dtype=torch.int32) * (NUMBERS // COUNT)


def shares(logits: torch.Tensor, top_k: float, top_p: float, temperature: float, candidates: int) -> torch.Tensor:
    """How often every token is drawn by numbers that lie evenly."""
    params = torch.tensor([[top_k, top_p, temperature]]).expand(COUNT, -1)
    found = draw(logits.expand(COUNT, -1), params, EVENLY, candidates)
    return found.bincount(minlength=logits.shape[-1]) / COUNT


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [(0, 1.0, 1.0), (5, 1.0, 0.7), (0, 0.6, 1.0), (8, 0.8, 1.5), (1, 1.0, 1.0), (3, 0.1, 2.0)],
)
def test_tokens_have_the_host_s_distribution(top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).mul(2).round(decimals=1)
    expected = probabilities(logits, torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]))
    found = shares(logits, top_k, top_p, temperature, 40)
    assert (found - expected[0]).abs().max() <= 1.5 / COUNT
    assert not found[expected[0] == 0].any()


def test_only_candidates_are_drawn() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert shares(logits, 0, 1.0, 1.0, 2).nonzero().flatten().tolist() == [1, 2]
    assert shares(logits, 0, 1.0, 1.0, 9).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_temperature_0_is_greedy_and_rows_have_options_of_their_own() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0], [5.0, 0.0, 0.0]])
    params = torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 1.0], [0.0, 0.5, 1.0]])
    last = torch.full((3,), NUMBERS - 1, dtype=torch.int32)
    assert draw(logits, params, last, 3).tolist() == [1, 0, 0]
    assert draw(logits, params, last // 2, 3).tolist() == [1, 2, 0]


def test_a_logit_of_minus_infinity_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    assert shares(logits, 0, 1.0, 1.0, 4).tolist() == [0.0, 0.5, 0.0, 0.5]
