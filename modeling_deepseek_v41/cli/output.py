# SPDX-License-Identifier: Apache-2.0
"""Reading texts from the command line, and writing tables, JSON and model output that is safe to show."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from ..dspark.statistics import SpeculationStats
from ..errors import RequestError

PIPE_WIDTH = 120
"""Columns of a table that does not go to a terminal."""


def texts(given: list[str] | None, files: list[str] | None, option: str) -> list[str]:
    """The texts of ``--{option}`` and then those of ``--{option}-file``, "-" being stdin; raises RequestError.

    A file is one text, exactly as it is, its last line break included.
    """
    found = list(given or [])
    if (files or []).count("-") > 1:
        raise RequestError(f"--{option}-file: stdin ('-') can be read once only")
    for name in files or []:
        try:
            content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        except OSError as error:
            raise RequestError(f"--{option}-file: {name}: cannot be read ({error.strerror})") from None
        try:
            found.append(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(f"--{option}-file: {name}: is not UTF-8 text (byte {error.start}: {error.reason})") from None
    if not found:
        raise RequestError(f"--{option}: give at least one, or a --{option}-file")
    return found


class Output(Console):
    """A console that leaves a closed pipe to the caller; rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, from inside rich's own handler of it."""
        raise BrokenPipeError


def console() -> Output:
    """Where tables go: stdout, as wide as the terminal."""
    return Output(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, highlight=False)


def print_json(value: Any) -> None:
    """``value`` as JSON on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))


def number(value: float) -> float | None:
    """``value`` for JSON, which has no infinity: None for it."""
    return value if math.isfinite(value) else None


def quoted(text: str, limit: int | None = None) -> str:
    """``text`` in quotes on one line, control characters escaped, at most ``limit`` characters of it."""
    short = text if limit is None or len(text) <= limit else text[:limit] + "…"
    return json.dumps(printable(short), ensure_ascii=False).replace("\\\\x", "\\x")


def printable(text: str) -> str:
    """``text`` with control characters but line breaks and tabs as escapes: a model must not steer a terminal."""
    return "".join(
        f"\\x{ord(char):02x}" if (ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160 else char for char in text
    )


def rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second, None where there was nothing to measure."""
    return tokens / seconds if tokens and seconds > 0 else None


def rate_words(tokens: int, seconds: float) -> str:
    """``tokens`` and their rate for a summary line."""
    speed = rate(tokens, seconds)
    return f"{tokens} tokens" + (f" in {seconds:.2f} s, {speed:.1f} tokens/s" if speed is not None else "")


def speculation_lines(stats: SpeculationStats) -> list[tuple[str, str]]:
    """(name, words) of the summary's lines on what speculation did."""
    if not stats.steps:
        return [("speculated", f"{stats.num_draft_tokens} drafts per step; no step was needed")]
    shares = ", ".join(f"{kept / stats.steps:.0%}" for kept in stats.accepted)
    bands = ", ".join(f"{low:.1f}-{high:.1f} {share:.0%} of {judged}" for low, high, judged, share in stats.calibration())
    return [
        (
            "speculated",
            f"{stats.num_draft_tokens} drafts per step, {stats.tokens_per_step:.2f} tokens per step of a prompt"
            f" ({stats.tokens} in {stats.steps}); drafts 1 to {stats.num_draft_tokens} kept in {shares} of the steps",
        ),
        ("confidence", f"drafts kept, by sigmoid(confidence): {bands}" if bands else "no draft was judged"),
    ]
