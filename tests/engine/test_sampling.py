# SPDX-License-Identifier: Apache-2.0
"""Sampling against an independent numpy computation, chi-square tests with fixed seeds, and the edges."""

import numpy as np
import pytest
import torch

from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.sampling import SamplingOptions, draw, greedy, log_probabilities, probabilities, sample

VOCAB = 23
INF = float("inf")


def by_numpy(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The definition, one token at a time, in fp64."""
    if temperature == 0:
        out = np.zeros(len(logits))
        out[int(np.argmax(logits))] = 1.0
        return out
    ranking = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    kept = ranking[:top_k] if top_k else ranking
    if top_p < 1:
        whole, sum_, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            sum_ += weights[token]
            if sum_ >= top_p * whole:
                break
        kept = nucleus
    out = np.zeros(len(logits))
    out[kept] = weights[kept]
    return out / out.sum()


def one(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    return probabilities(logits[None], torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]))[0]


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    keep = expected > 0
    assert observed[~keep].sum() == 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return torch.special.gammaincc((keep.sum() - 1) / 2, statistic / 2).item()


OPTIONS = [
    (1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (1.5, 5, 1.0),
    (1.0, 0, 0.7),
    (1.5, 9, 0.8),
    (0.7, 1, 1.0),
    (0.0, 3, 0.5),
    (2.0, 99, 0.999),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), OPTIONS)
def test_distribution(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 2
    expected = by_numpy(logits.numpy(), temperature, top_k, top_p)
    got = one(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)
    assert (got == 0).tolist() == (expected == 0).tolist()
    draws = 20_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    mass = torch.from_numpy(expected).float().double()
    ids = draw(got.expand(draws, -1), uniform)
    counts = ids.bincount(minlength=VOCAB).double()
    if (expected > 0).sum() == 1:
        assert counts.max() == draws
    else:
        assert p_value(counts, mass * draws) > 1e-3


def test_chi_square_notices_a_wrong_distribution() -> None:
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 2
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    counts = draw(one(logits, 1.05).expand(20_000, -1), uniform).bincount(minlength=VOCAB).double()
    assert p_value(counts, one(logits, 1.0).double() * 20_000) < 1e-3


def test_sample_draws_from_probabilities() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB)
    options = (
        torch.tensor([0.0, 0.5, 1.0, 1.5, 1.0, 0.0]),
        torch.tensor([0, 4, 0, 7, 2, 1]),
        torch.tensor([1, 1, 0.5, 0.9, 1, 0.1]),
    )
    uniform = torch.rand(6, dtype=torch.float64)
    assert torch.equal(sample(logits, *options, uniform), draw(probabilities(logits, *options), uniform))


def test_inverse_cdf_at_its_edges() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.999, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert draw(probs.expand(6, -1), uniform).tolist() == [1, 1, 3, 3, 3, 3]


def test_unnormalised_mass_can_be_drawn_from() -> None:
    assert draw(torch.tensor([[0.0, 0.1, 0.1], [0.3, 0.0, 0.1]]), torch.tensor([0.6, 0.5])).tolist() == [2, 0]


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    assert greedy(logits[None]).item() == 1
    assert one(logits, 0.0).tolist() == [0, 1, 0, 0, 0]
    assert one(logits, 1.0, top_k=2).nonzero().flatten().tolist() == [1, 2]
    assert one(logits, 1.0, top_p=0.4).nonzero().flatten().tolist() == [1, 2]
    assert greedy(torch.tensor([[-0.0, 0.0]])).item() == 0


def test_negative_logits_and_padded_columns() -> None:
    logits = torch.tensor([-50.0, -40.0, -41.0, -INF, -INF])
    assert greedy(logits[None]).item() == 1
    for options in ((1.0, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.99), (30.0, 0, 1.0)):
        probs = one(logits, *options)
        assert probs[3:].tolist() == [0, 0]
        assert probs.sum().item() == pytest.approx(1)
    assert draw(one(logits, 1000.0)[None], torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 2


def test_one_hot_logits() -> None:
    logits = torch.full((VOCAB,), -INF)
    logits[7] = -3.0
    for options in ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.1, 5, 0.5), (100.0, 0, 0.1)):
        assert one(logits, *options)[7] == 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([200.0, -200.0, 200.0, 0.0])
    probs = one(logits, temperature)
    expected = [0.25] * 4 if temperature > 1 else [0.5, 0, 0.5, 0]
    assert probs.tolist() == pytest.approx(expected)


def test_top_p_keeps_the_first_token_always_and_one_keeps_all() -> None:
    logits = torch.tensor([0.0, 30.0, -60.0])
    assert one(logits, 1.0, top_p=1e-9).tolist() == [0, 1, 0]
    assert (one(logits, 1.0, top_p=1.0) > 0).all()


def test_top_p_counts_the_share_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (one(logits, 1.0, top_k=2, top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (one(logits, 1.0, top_k=0, top_p=0.5) > 0).tolist() == [True, True, False, False]


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 3001) * 3
    options = torch.tensor([0.0, 0.7, 1.0, 1.3, 1.0]), torch.tensor([0, 50, 0, 0, 0]), torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0])
    together = probabilities(logits, *options)
    for row in range(5):
        alone = probabilities(logits[row : row + 1].clone(), *(option[row : row + 1] for option in options))
        assert torch.equal(together[row], alone[0])
        assert torch.equal(log_probabilities(logits)[row], log_probabilities(logits[row : row + 1].clone())[0])
    unrestricted = probabilities(logits[3:], options[0][3:])
    assert torch.equal(together[3:], unrestricted)


def test_generators_are_reproducible_and_a_missing_seed_is_random() -> None:
    def first(options: SamplingOptions) -> float:
        return torch.rand((), generator=options.generator()).item()

    assert first(SamplingOptions(seed=5)) == first(SamplingOptions(seed=5)) != first(SamplingOptions(seed=6))
    assert first(SamplingOptions()) != first(SamplingOptions())
    first(SamplingOptions(seed=2**63 - 1))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")}, {"temperature": -0.1}, {"temperature": INF}, {"temperature": "1"}, {"temperature": True},
        {"top_k": -1}, {"top_k": 1.5}, {"top_k": None}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": float("nan")}, {"top_p": -1},
        {"seed": -1}, {"seed": 2**63}, {"seed": 0.5},
    ],
)  # fmt: skip
def test_options_outside_their_range(options: dict) -> None:
    (name, value) = next(iter(options.items()))
    with pytest.raises(RequestError, match=rf"^{name}: expected .*, found "):
        SamplingOptions(**options)
