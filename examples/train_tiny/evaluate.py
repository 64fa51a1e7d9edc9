# SPDX-License-Identifier: Apache-2.0
"""Bits per byte and tokens per speculative step on held-out text, by the package itself, in the release's numerics.

    python -m examples.train_tiny.evaluate examples/tiny_bible/ckpt examples/tiny_bible/held_out.txt

A text is scored in pieces, as most texts are short, and once as a single long sequence.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.dspark.options import Speculation
from modeling_deepseek_v41.dspark.statistics import SpeculationStats
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.request import Request
from modeling_deepseek_v41.score import Scorer
from modeling_deepseek_v41.text import TextTokenizer, load_tokenizer

PIECE = 2500
"""Characters of text that are scored as one sequence, from a start token."""

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 40, 64


def evaluate(folder: Path, text: str) -> Iterator[str]:
    """Measures ``folder`` on ``text``, held out from training, and tells what it found line by line."""
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    model = load_model(folder, "release", progress=False, drafter=True)
    pieces, scorer = split(text, PIECE), Scorer(model, tokenizer)
    yield f"bits per byte, {len(pieces)} pieces of about {PIECE} characters: {bits_per_byte(scorer, pieces):.3f}"
    start = beginning(text, tokenizer, model.max_seq_len)
    count = len(tokenizer.encode(start))
    yield f"bits per byte, the first {count} tokens as one sequence: {bits_per_byte(scorer, [start]):.3f}"
    places = split(text, len(text) // PROMPTS)[:PROMPTS]
    prompts = [tokenizer.encode(place)[:PROMPT_TOKENS] for place in places]
    texts, stats = speculate(model, tokenizer, prompts, NEW_TOKENS)
    yield f"tokens per speculative step, {len(prompts)} prompts, {NEW_TOKENS} new tokens each: {stats.tokens_per_step:.2f}"
    kept = ", ".join(f"{kept / stats.steps:.2f}" for kept in stats.accepted)
    yield f"drafts 1 to {stats.num_draft_tokens} kept in these shares of the steps: {kept}"
    bands = ", ".join(f"{low:.1f}-{high:.1f} {share:.2f} of {count}" for low, high, count, share in stats.calibration())
    yield f"drafts kept, by the drafter's confidence: {bands}"
    yield f"greedy text: {tokenizer.decode(prompts[0][1:])!r} -> {texts[0]!r}"


def split(text: str, size: int) -> list[str]:
    """``text`` in pieces of whole lines, about ``size`` characters each."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len(pieces[-1]) + len(line) > size and pieces[-1]:
            pieces.append("")
        pieces[-1] += line
    return pieces


def beginning(text: str, tokenizer: TextTokenizer, tokens: int) -> str:
    """``text``, or so much of it that it has fewer than ``tokens`` tokens."""
    count = len(tokenizer.encode(text))
    return text if count <= tokens else split(text, int(0.9 * len(text) * tokens / count))[0]


def bits_per_byte(scorer: Scorer, pieces: Sequence[str]) -> float:
    """Bits that the model needs for all ``pieces``, each from a start token, per byte of them."""
    nats = -sum(scorer.text(piece).total for piece in pieces)
    return nats / math.log(2) / sum(len(piece.encode()) for piece in pieces)


def speculate(
    model: DeepseekV41Model, tokenizer: TextTokenizer, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[str], SpeculationStats]:
    """Greedy continuations of ``prompts`` with full blocks of drafts, and what speculation did for all of them."""
    engine = Engine(model, tokenizer, speculation=Speculation())
    texts = [completion.text for completion in engine.generate([Request(prompt, new_tokens) for prompt in prompts])]
    assert engine.stats.speculation is not None
    return texts, engine.stats.speculation


def main() -> None:
    """Measures the folder and the text of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_tiny.evaluate", description="Measures a trained checkpoint on held-out text."
    )
    parser.add_argument("folder", type=Path, help="a checkpoint's folder")
    parser.add_argument("text", type=Path, help="a text that the model was not trained on")
    arguments = parser.parse_args()
    for line in evaluate(arguments.folder, arguments.text.read_text(encoding="utf-8")):
        print(line)


if __name__ == "__main__":
    main()
