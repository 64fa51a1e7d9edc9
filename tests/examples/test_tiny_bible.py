# SPDX-License-Identifier: Apache-2.0
"""The trained checkpoint in the repository: what its README claims, on a small sample."""

import re
from pathlib import Path

import pytest

from examples.train_tiny.evaluate import bits_per_byte, speculate, split
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.score import Scorer
from modeling_deepseek_v41.text import load_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tiny_bible"
HELD_OUT = (FOLDER / "held_out.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model() -> DeepseekV41Model:
    return load_model(FOLDER / "ckpt", "release", progress=False, drafter=True)


def test_it_is_small_and_reaches_far() -> None:
    assert sum(file.stat().st_size for file in (FOLDER / "ckpt").iterdir()) < 6_500_000
    assert load_config(FOLDER / "ckpt").max_position_embeddings >= 4096


def test_bits_per_byte_on_held_out_text(model: DeepseekV41Model) -> None:
    scorer = Scorer(model, load_tokenizer(FOLDER / "ckpt", model.config))
    assert bits_per_byte(scorer, split(HELD_OUT, 2500)[:3]) <= 2.2


def test_tokens_per_step_and_readable_text(model: DeepseekV41Model) -> None:
    tokenizer = load_tokenizer(FOLDER / "ckpt", model.config)
    known = set(re.findall(r"[a-z]+", HELD_OUT.lower()))
    prompts = [tokenizer.encode(piece)[:40] for piece in split(HELD_OUT, 2500)[:4]]
    texts, stats = speculate(model, tokenizer, prompts, 48)
    assert stats.tokens_per_step is not None and stats.tokens_per_step >= 1.8
    words = [word for text in texts for word in re.findall(r"[a-z]+", text.lower())[1:-1]]
    assert len(words) > 80 and sum(word in known for word in words) / len(words) > 0.8
