# SPDX-License-Identifier: Apache-2.0
"""``deepseek-v41 score``: how probable texts are."""

import argparse
import sys
import time
from typing import Any, NamedTuple

from rich.table import Table

from ..errors import RequestError
from ..parallel import Parallel
from ..score import Scorer, TextScore, text_tokens
from .loaded import Opened, add_model_arguments, load, open_checkpoint
from .output import console, number, print_json, quoted, rate_words, texts
from .ranks import on_ranks

EPILOG = """\
Log-probabilities are natural logarithms, each token given the beginning-of-sequence token and all tokens before it. Bits per
byte do not depend on the tokenizer, so they can be compared between models.

examples:
  deepseek-v41 score --model-path CKPT --text "The ferry leaves at seven." --text "Seven leaves ferry the at."
  deepseek-v41 score --model-path CKPT --text-file chapter.txt --json
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``score``."""
    parser = subparsers.add_parser(
        "score",
        help="log-likelihood, perplexity and bits per byte of texts",
        description="Computes how probable the model finds each text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_arguments(parser)
    group = parser.add_argument_group("texts")
    group.add_argument("--text", action="append", metavar="TEXT", help="a text to score; may be repeated")
    group.add_argument("--text-file", action="append", metavar="FILE", help="a file with one text, read exactly; - is stdin")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="a list of objects with the log-probability of every token")


class Job(NamedTuple):
    """What all ranks do."""

    args: argparse.Namespace
    opened: Opened
    texts: list[str]


def run(args: argparse.Namespace) -> int:
    """Scores and prints; raises the package's errors for what cannot be used."""
    return on_ranks(args, _prepare, _score)


def _prepare(args: argparse.Namespace) -> Job:
    given = texts(args.text, args.text_file, "text")
    opened = open_checkpoint(args)
    for place, text in enumerate(given, 1):
        try:
            text_tokens(text, opened.tokenizer, opened.config, opened.max_seq_len)
        except RequestError as error:
            raise RequestError(f"text {place} of {len(given)}: {error}") from None
    return Job(args, opened, given)


def _score(job: Job, parallel: Parallel) -> int:
    args, opened, given = job
    loaded = load(args, opened, parallel)
    scorer = Scorer(loaded.model, opened.tokenizer)
    began = time.perf_counter()
    scores = [scorer.text(text) for text in given]
    seconds = time.perf_counter() - began
    if args.json:
        print_json([_as_json(score) for score in scores])
    else:
        console().print(_table(scores))
    sys.stdout.flush()
    tokens = sum(len(score.token_ids) for score in scores)
    lines = (("model", loaded.model_line), ("weights", loaded.weights_line), ("scored", rate_words(tokens, seconds)))
    for name, words in lines:
        print(f"{name:9}{words}", file=sys.stderr)
    return 0


def _as_json(score: TextScore) -> dict[str, Any]:
    return {
        "text": score.text,
        "token_ids": list(score.token_ids),
        "token_logprobs": [number(logprob) for logprob in score.logprobs],
        "logprob": number(score.total),
        "perplexity": number(score.perplexity),
        "bits_per_byte": number(score.bits_per_byte),
    }


def _table(scores: list[TextScore]) -> Table:
    table = Table()
    for name in ("tokens", "log-probability", "per token", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    table.add_column("text")
    for score in scores:
        count = len(score.token_ids)
        numbers = (f"{score.total:.3f}", f"{score.total / count:.3f}", f"{score.perplexity:.2f}", f"{score.bits_per_byte:.4f}")
        table.add_row(str(count), *numbers, quoted(score.text, 40))
    return table
