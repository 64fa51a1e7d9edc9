# SPDX-License-Identifier: Apache-2.0
"""Greedy texts of 512 tokens through the engine, with and without speculation: 20 prompts, every k, batch 1 and 4.

On the trained checkpoint of examples/, whose context has 4,096 positions or more; prompts are pieces of text that it has not
seen, of 1 token to 4 windows. The drafter is the checkpoint's, or one that is always right, always wrong, or random. A sample
of this is in the fast suite: test_greedy_equality.py and engine/test_speculation.py.
"""

import functools
from pathlib import Path

import pytest
import torch
from speculating import scripts

from modeling_deepseek_v41.dspark.options import Speculation
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.request import Request
from modeling_deepseek_v41.text import load_tokenizer

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_bible"
TOKENS = 512


@functools.cache
def _model(numerics: str) -> DeepseekV41Model:
    model = load_model(TINY / "ckpt", numerics, progress=False, drafter=True)
    assert model.config.max_position_embeddings >= 4096
    return model


@functools.cache
def _requests(model: DeepseekV41Model) -> list[Request]:
    """20 prompts in an order in which four neighbours differ in length."""
    tokenizer = load_tokenizer(TINY / "ckpt", model.config)
    text = tokenizer.encode((TINY / "held_out.txt").read_text(encoding="utf-8"))
    lengths = [1, 2, 3, *torch.linspace(4, 4 * model.config.sliding_window, 17).int().tolist()]
    pieces = [text[150 * place : 150 * place + lengths[place * 7 % 20]] for place in range(20)]
    return [Request(piece, TOKENS, ignore_eos=True) for piece in pieces]


@functools.cache
def _answers(model: DeepseekV41Model) -> list[tuple[int, ...]]:
    """What the plain engine says."""
    return [completion.token_ids for completion in Engine(model, max_batch=4).generate(_requests(model))]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["drafter", "right", "wrong", "random"])
@pytest.mark.parametrize("numerics", ["fp32", "release"])
def test_512_tokens(numerics: str, kind: str, batch: int) -> None:
    model = _model(numerics)
    requests, answers = _requests(model), _answers(model)
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
            steps = {"right": -(-(TOKENS - 1) // (k + 1)), "wrong": TOKENS - 1}
            if kind in steps:
                assert engine.stats.speculation.steps == batch * steps[kind], "a row's steps, added up"
