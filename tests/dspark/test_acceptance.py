# SPDX-License-Identifier: Apache-2.0
"""Acceptance: the greedy rule by hand, and a chi-square test that speculative sampling leaves the distribution as it is.

The test's model is a Markov chain: its word on the next token depends on the last two tokens, so the tokens of a block are
tested jointly. The drafter's word is another chain.
"""

import math

import pytest
import torch
from chi_square import p_value
from torch import Tensor

from modeling_deepseek_v41.dspark.acceptance import Accepted, accept_greedy, accept_sampled
from modeling_deepseek_v41.dspark.choice import Choice
from modeling_deepseek_v41.sampling import draw

VOCAB, K, DRAWS = 5, 3, 200_000


def one_hot_logits(ids: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(ids), VOCAB).float().unsqueeze(0)


@pytest.mark.parametrize(
    ("drafts", "best", "length", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 4, [1, 2, 3, 4]),
        ([1, 2, 3], [1, 2, 0, 4], 4, [1, 2, 0]),
        ([1, 2, 3], [0, 2, 3, 4], 4, [0]),
        ([1, 2, 3], [1, 0, 3, 4], 4, [1, 0]),
        ([1, 2, 3], [1, 2, 3, 4], 2, [1, 2]),
        ([1, 2, 3], [1, 2, 3, 4], 1, [1]),
        ([1, 2, 3], [0, 2, 3, 4], 0, []),
    ],
)
def test_greedy_keeps_the_longest_prefix_plus_one(drafts: list[int], best: list[int], length: int, expected: list[int]) -> None:
    ids, logits = torch.tensor([drafts]), one_hot_logits(best)
    wanted = expected + [-1] * (4 - len(expected))
    greedy = accept_greedy(ids, logits, torch.tensor([length]))
    assert greedy.tokens.tolist() == [wanted] and greedy.counts.tolist() == [len(expected)]
    cold = Choice(torch.zeros(1, dtype=torch.float64)).probabilities(logits)
    for q in (None, torch.full((1, 3, VOCAB), 0.2)):
        sampled = accept_sampled(ids, q, cold, torch.full((1, 4), 0.999), torch.tensor([length]))
        assert sampled.tokens.tolist() == [wanted], "temperature 0 in a batch that samples is greedy"


def test_padding_rows_do_not_matter() -> None:
    logits = one_hot_logits([1, 2, 3, 4])
    logits[:, 2:] = torch.nan
    drafts, length = torch.tensor([[1, 2, 3]]), torch.tensor([2])
    assert accept_greedy(drafts, logits, length).tokens.tolist() == [[1, 2, -1, -1]]
    probabilities = logits.clone()
    assert accept_sampled(drafts, None, probabilities, torch.full((1, 4), 0.5), length).tokens.tolist() == [[1, 2, -1, -1]]


def test_a_draft_that_the_target_forbids_is_replaced() -> None:
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0]] * 2])
    out = accept_sampled(torch.tensor([[0]]), None, p, torch.tensor([[0.0, 0.7]]), torch.tensor([2]))
    assert out.tokens.tolist() == [[2, -1]]


def test_equal_distributions_keep_every_draft() -> None:
    p = torch.softmax(torch.randn(64, K + 1, VOCAB, generator=torch.Generator().manual_seed(0)), -1)
    drafts = p[:, :K].argmax(-1)
    uniforms = torch.rand(64, K + 1, generator=torch.Generator().manual_seed(1))
    assert (accept_sampled(drafts, p[:, :K], p, uniforms, torch.full((64,), K + 1)).counts == K + 1).all()


class Chain:
    """Logits that depend on the last two tokens: [VOCAB, VOCAB, VOCAB]."""

    def __init__(self, seed: int, scale: float, choice: Choice):
        logits = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
        self.table = choice.probabilities(logits)

    def __call__(self, before: Tensor, last: Tensor) -> Tensor:
        """The distribution [n, VOCAB] behind the tokens ``before`` and ``last`` [n]."""
        return self.table[before, last]

    def joint(self, tokens: int) -> Tensor:
        """The probability of every continuation of (0, 0) by ``tokens`` tokens: [VOCAB] * tokens, fp64."""
        ids = torch.cartesian_prod(*[torch.arange(VOCAB)] * tokens).view(-1, tokens)
        before, last, mass = torch.zeros(len(ids)).long(), torch.zeros(len(ids)).long(), torch.ones(len(ids)).double()
        for i in range(tokens):
            mass *= self(before, last).double().gather(1, ids[:, i : i + 1])[:, 0]
            before, last = last, ids[:, i]
        return mass


def wrong_always_from_target(drafts: Tensor, q: Tensor | None, p: Tensor, uniforms: Tensor, length: Tensor) -> Accepted:
    """A rejected draft is replaced by a draw from p, not from what q left of it: a well-known fault."""
    good = accept_sampled(drafts, q, p, uniforms, length)
    at = (good.counts - 1).unsqueeze(1)
    again = draw(p.gather(1, at.unsqueeze(-1).expand(-1, 1, VOCAB)).squeeze(1), uniforms[:, -1])
    return Accepted(good.tokens.scatter(1, at, again.unsqueeze(1)), good.counts)


def wrong_ratio(drafts: Tensor, q: Tensor | None, p: Tensor, uniforms: Tensor, length: Tensor) -> Accepted:
    """Acceptance with probability p instead of p / q, as if the draft had been chosen without chance."""
    one = None if q is None else torch.ones_like(q)
    return accept_sampled(drafts, one, p, uniforms, length)


def generate(target: Chain, draft: Chain, sampled: bool, rule: object, seed: int) -> Tensor:
    """K + 1 tokens behind (0, 0), DRAWS times, in as many steps as it takes: [DRAWS, K + 1]."""
    generator = torch.Generator().manual_seed(seed)
    n, goal = DRAWS, K + 1
    out = torch.zeros(n, 2 + goal, dtype=torch.int64)
    done = torch.zeros(n, dtype=torch.int64)
    rows = torch.arange(n)
    while (done < goal).any():
        active = rows[done < goal]
        at = done[active] + 2
        before, last = out[active, at - 2], out[active, at - 1]
        uniforms = torch.rand(len(active), 2 * K + 1, generator=generator, dtype=torch.float64)
        drafts, q, p = [], [], []
        for i in range(K):
            p.append(target(before, last))
            q.append(draft(before, last))
            token = inverse(q[-1], uniforms[:, i]) if sampled else q[-1].argmax(-1)
            drafts.append(token)
            before, last = last, token
        p.append(target(before, last))
        limit = torch.minimum(goal - done[active], torch.tensor(K + 1))
        accepted = rule(  # type: ignore[operator]
            torch.stack(drafts, 1), torch.stack(q, 1) if sampled else None, torch.stack(p, 1), uniforms[:, K:], limit
        )
        for i in range(K + 1):
            real = i < accepted.counts
            out[active[real], at[real] + i] = accepted.tokens[real, i]
        done[active] += accepted.counts
    return out[:, 2:]


def inverse(p: Tensor, u: Tensor) -> Tensor:
    """One draw per row, all rows at once: the test's own."""
    mass = p.double().cumsum(-1)
    return torch.searchsorted(mass, (u * mass[:, -1]).unsqueeze(1), right=True).squeeze(1).clamp_max(VOCAB - 1)


CASES = [
    (0.5, 0, 1.0), (1.0, 0, 1.0), (1.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.7), (1.5, 4, 0.8),
]  # fmt: skip
SAMPLED = pytest.mark.parametrize("sampled", [False, True], ids=["greedy drafts", "sampled drafts"])


def chains(temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple[Chain, Chain]:
    """The target and a draft that is half right: both under the same options."""
    choice = options(temperature, top_k, top_p)
    return Chain(1, 1.0, choice), Chain(2, 0.7, choice)


@SAMPLED
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_speculation_leaves_the_distribution_as_it_is(temperature: float, top_k: int, top_p: float, sampled: bool) -> None:
    target, draft = chains(temperature, top_k, top_p)
    tokens = generate(target, draft, sampled, accept_sampled, seed=3)
    assert p_value(tokens, target.joint(K + 1), VOCAB) > 1e-3


@pytest.mark.parametrize(
    ("rule", "sampled"), [(wrong_always_from_target, False), (wrong_always_from_target, True), (wrong_ratio, True)]
)
def test_a_wrong_rule_is_found(rule: object, sampled: bool) -> None:
    target, draft = chains(1.0)
    assert p_value(generate(target, draft, sampled, rule, seed=3), target.joint(K + 1), VOCAB) < 1e-12


def test_the_chi_square_test_itself() -> None:
    target, _ = chains(1.0)
    generator, before = torch.Generator().manual_seed(4), torch.zeros(DRAWS).long()
    last, tokens = before, []
    for _ in range(K + 1):
        before, last = last, inverse(target(before, last), torch.rand(DRAWS, generator=generator, dtype=torch.float64))
        tokens.append(last)
    assert p_value(torch.stack(tokens, 1), target.joint(K + 1), VOCAB) > 1e-3
    assert math.isclose(target.joint(2).sum().item(), 1, rel_tol=1e-6)


def options(temperature: float, top_k: int = 0, top_p: float = 1.0) -> Choice:
    restricted = top_k or top_p < 1
    return Choice(
        torch.full((VOCAB,), temperature, dtype=torch.float64),
        torch.full((VOCAB,), top_k) if restricted else None,
        torch.full((VOCAB,), top_p, dtype=torch.float64) if restricted else None,
    )
