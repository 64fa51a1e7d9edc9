# SPDX-License-Identifier: Apache-2.0
"""The sampled step: its random numbers, and rows of one batch that choose in different ways."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chi_square import p_value
from speculating import RANK, Session, plain
from torch import Tensor

from modeling_deepseek_v41.dspark.choice import Choice
from modeling_deepseek_v41.dspark.drafter import Drafts
from modeling_deepseek_v41.dspark.step import speculative_step
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.sampling import draw
from modeling_deepseek_v41.state import State

VOCAB, K = 3, 2


class ChainModel:
    """Stands for a backbone: the logits behind a token depend on that token alone."""

    def __init__(self, logits: Tensor):
        self.table, self.config, self.state_names = logits, SimpleNamespace(dspark_block_size=5), []

    def __call__(self, ids: Tensor, *rest: Any, read_len: int) -> tuple[Tensor, Tensor]:
        return ids, ids

    def embed(self, ids: Tensor, rank: Tensor) -> Tensor:
        raise AssertionError("the test's drafter embeds nothing")

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden]


class ChainDrafter:
    """Stands for a drafter: another chain."""

    def __init__(self, logits: Tensor):
        self.table = logits

    def update(self, taps: Tensor, state: State) -> None:
        assert taps.shape[1] == K + 1

    def propose(
        self, token: Tensor, rank: Tensor, state: State, embed: Any, head: Any, num_draft_tokens: int,
        choice: Choice | None = None, uniforms: Tensor | None = None,
    ) -> Drafts:  # fmt: skip
        ids, chances = [], []
        for i in range(num_draft_tokens):
            logits = self.table[token].unsqueeze(1)
            if choice is None or uniforms is None:
                token = logits.squeeze(1).argmax(-1)
            else:
                chances.append(choice.probabilities(logits))
                token = draw(chances[-1].squeeze(1), uniforms[:, i])
            ids.append(token)
        stacked = torch.stack(ids, 1)
        q = torch.cat(chances, 1) if chances else None
        return Drafts(stacked, torch.zeros(*stacked.shape, VOCAB), q, torch.zeros(stacked.shape))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy drafts", "sampled drafts"])
def test_the_whole_step_draws_from_the_target(sampled: bool) -> None:
    """Two steps of a batch of many rows; the first K + 1 new tokens of every row, jointly."""
    rows, generator = 1500, torch.Generator().manual_seed(6)
    target, draft = (torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    choice = Choice(torch.full((rows,), 0.8, dtype=torch.float64))
    start, length, slot = torch.full((rows,), 7), torch.full((rows,), K + 1), torch.arange(rows)
    token, texts = torch.zeros(rows, dtype=torch.int64), [[] for _ in range(rows)]
    while min(len(text) for text in texts) < K + 1:
        step, _ = speculative_step(
            ChainModel(target), ChainDrafter(draft), token, start, length, slot, RANK, [],  # type: ignore[arg-type]
            num_draft_tokens=K, read_len=64, choice=choice, sampled_drafts=sampled,
            uniforms=torch.rand(rows, 2 * K + 1, generator=generator, dtype=torch.float64),
        )  # fmt: skip
        assert torch.equal(step.next_start, start + step.counts)
        for text, new, count in zip(texts, step.tokens.tolist(), step.counts.tolist(), strict=True):
            text += new[:count]
        token, start = step.next_token, step.next_start
    p = (target / 0.8).softmax(-1).double()
    joint = p[0, :, None, None] * p[:, :, None] * p[None]
    found = torch.tensor([text[: K + 1] for text in texts])
    assert p_value(found, joint.flatten(), VOCAB) > 1e-3
    wrong = (target / 1.2).softmax(-1).double()
    assert p_value(found, (wrong[0, :, None, None] * wrong[:, :, None] * wrong[None]).flatten(), VOCAB) < 1e-3


@pytest.mark.parametrize("numerics", ["fp32"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy drafts", "sampled drafts"])
def test_greedy_rows_in_a_batch_that_samples(model: DeepseekV41Model, prompts: list[Tensor], sampled: bool) -> None:
    """Temperature 0 and top_k 1 are greedy beside a row of temperature 1; that row does not depend on the others."""
    chosen = [prompts[2], prompts[1], prompts[2], prompts[0]]
    choice = Choice(
        torch.tensor([0.0, 1.0, 1.0, 0.7], dtype=torch.float64), torch.tensor([0, 1, 0, 4]),
        torch.tensor([1.0, 1.0, 0.9, 1.0], dtype=torch.float64),
    )  # fmt: skip
    together = texts(model, chosen, choice, sampled)
    for row in (0, 1):
        assert together[row] == plain(model, chosen[row], len(together[row])).tolist()
    for row in (2, 3):
        own = Choice(*(option[row : row + 1] for option in choice if option is not None))
        alone = texts(model, [chosen[row]], own, sampled, first_seed=row)
        assert together[row][: len(alone[0])] == alone[0][: len(together[row])]


def texts(
    model: DeepseekV41Model, prompts: list[Tensor], choice: Choice, sampled: bool, first_seed: int = 0
) -> list[list[int]]:
    """Four speculative steps behind every prompt and the greedy first token; row b draws from its own generator."""
    session, rows, k = Session(model, len(prompts)), len(prompts), 3
    generators = [torch.Generator().manual_seed(first_seed + row) for row in range(rows)]
    token = torch.stack([session.read(prompt, slot=slot).argmax() for slot, prompt in enumerate(prompts)])
    out = [[first] for first in token.tolist()]
    start = torch.tensor([prompt.numel() for prompt in prompts])
    for _ in range(4):
        uniforms = torch.stack([torch.rand(2 * k + 1, dtype=torch.float64, generator=source) for source in generators])
        step = session.step(
            token, start, torch.full((rows,), k + 1), torch.arange(rows), k,
            choice=choice, uniforms=uniforms, sampled_drafts=sampled,
        )  # fmt: skip
        for text, new, count in zip(out, step.tokens.tolist(), step.counts.tolist(), strict=True):
            text += new[:count]
        token, start = step.next_token, step.next_start
    return out
