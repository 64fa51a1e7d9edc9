# SPDX-License-Identifier: Apache-2.0
"""Prompts and what must come behind them: the golden set's, and what this package's engine gives on a plain CPU."""

import functools
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from sources import ROOT, TINY
from tokenizers import Tokenizer

from modeling_deepseek_v41.dspark.options import Speculation
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.request import Request

GOLDEN = load_file(TINY / "golden_f32.safetensors")
NEW = 25
"""Tokens behind every prompt."""
BUCKET = 40
"""The largest context bucket of the runs that have several."""
TRAINED = ROOT / "examples" / "tiny_bible"


def golden(lengths: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """The golden prompts of ``lengths``, and their texts."""
    prompts = [GOLDEN[f"p{length}.input_ids"][0].tolist() for length in lengths]
    return prompts, [GOLDEN[f"p{length}.generated"][0].tolist() for length in lengths]


def bucket_prompts() -> list[list[int]]:
    """Golden prompts of one token and of the largest bucket's size, and one of three times that."""
    short, middle, long = golden([1, BUCKET, 100])[0]
    return [short, middle, (long + middle)[: 3 * BUCKET]]


def trained_prompts() -> list[list[int]]:
    """Pieces of the trained checkpoint's held-out text, of the same lengths and of 17 tokens."""
    ids = Tokenizer.from_file(str(TRAINED / "ckpt" / "tokenizer.json")).encode((TRAINED / "held_out.txt").read_text()).ids
    return [ids[200:201], ids[:BUCKET], ids[50 : 50 + 3 * BUCKET], ids[300:317]]


class EngineTexts(NamedTuple):
    """What the engine gave."""

    texts: list[list[int]]
    steps: int
    """Steps of all sequences; one of a sequence counts as one."""


@functools.cache
def _engine_text(folder: Path, prompt: tuple[int, ...], fused: bool) -> tuple[list[int], int]:
    engine = Engine(_model(folder), speculation=Speculation() if fused else None)
    [completion] = engine.generate([Request(list(prompt), max_new_tokens=NEW, ignore_eos=True)])
    steps = engine.stats.speculation.steps if engine.stats.speculation else engine.stats.decode_steps
    return list(completion.token_ids), steps


@functools.cache
def _model(folder: Path) -> DeepseekV41Model:
    return load_model(folder, "fp32", 256, progress=False, drafter=True)


def engine(folder: Path, prompts: list[list[int]], fused: bool) -> EngineTexts:
    """Greedy texts behind ``prompts`` from the checkpoint in ``folder`` in float32, with DSpark where ``fused``."""
    found = [_engine_text(folder, tuple(prompt), fused) for prompt in prompts]
    return EngineTexts([text for text, _ in found], sum(steps for _, steps in found))
