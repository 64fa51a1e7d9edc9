# SPDX-License-Identifier: Apache-2.0
"""Greedy texts of 512 tokens through the engine, with and without speculation: 20 prompts, every k, batch 1 and 4.

The context has 4,096 positions; prompts have 1 token to 4 windows. The drafter is the checkpoint's, or one that is always
right, always wrong, or random. A sample of this is in the fast suite: test_greedy_equality.py and engine/test_speculation.py.
"""

import functools
from pathlib import Path

import pytest
import torch
from long_context import long_model
from speculating import scripts

from modeling_deepseek_v41.dspark.options import Speculation
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.request import Request

TOKENS = 512


@functools.cache
def _model(numerics: str, folder: Path) -> DeepseekV41Model:
    return long_model(numerics, "auto", folder)


@functools.cache
def _requests(window: int, vocab: int) -> list[Request]:
    """20 prompts in an order in which four neighbours differ in length."""
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 2, 3, *torch.linspace(4, 4 * window, 17).int().tolist()]
    prompts = [torch.randint(3, vocab - 3, (length,), generator=generator).tolist() for length in lengths]
    return [Request(prompts[place * 7 % 20], TOKENS, ignore_eos=True) for place in range(20)]


@functools.cache
def _answers(model: DeepseekV41Model) -> list[tuple[int, ...]]:
    """What the plain engine says."""
    requests = _requests(model.config.sliding_window, model.config.vocab_size)
    return [completion.token_ids for completion in Engine(model, max_batch=4).generate(requests)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["drafter", "right", "wrong", "random"])
@pytest.mark.parametrize("numerics", ["fp32", "release"])
def test_512_tokens(numerics: str, kind: str, batch: int, folder: Path) -> None:
    model = _model(numerics, folder)
    requests, answers = _requests(model.config.sliding_window, model.config.vocab_size), _answers(model)
    for k in (1, 2, 3, 4, 5):
        for first in range(0, 20, batch):
            some, expected = requests[first : first + batch], answers[first : first + batch]
            drafter = None
            if kind != "drafter":
                prompts = [torch.tensor(request.prompt) for request in some]
                drafter = scripts(model, prompts, [torch.tensor(answer) for answer in expected], kind)
            engine = Engine(model, max_batch=batch, speculation=Speculation(k, drafter=drafter))
            found = [completion.token_ids for completion in engine.generate(some)]
            assert found == expected, f"k {k}, prompts {first} to {first + batch - 1}"
            if kind == "right":
                assert engine.stats.decode_steps == -(-(TOKENS - 1) // (k + 1))
            if kind == "wrong":
                assert engine.stats.decode_steps == TOKENS - 1
