# SPDX-License-Identifier: Apache-2.0
"""The command ``deepseek-v41``: one module per subcommand, each with ``add_parser(subparsers)`` and ``run(args) -> int``."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import DeepseekV41Error, RequestError
from . import generate, inspect, plan, score, shard, verify
from .failures import explained
from .ranks import is_silent

COMMANDS = (generate, score, inspect, verify, shard, plan)

EPILOG = """\
examples:
  deepseek-v41 inspect CKPT
  deepseek-v41 generate --model-path CKPT --prompt "Once upon a time" --max-new-tokens 50
  deepseek-v41 score --model-path CKPT --text "The ferry leaves at seven."
  deepseek-v41 verify --model-path CKPT --golden GOLDEN
  deepseek-v41 shard --model-path CKPT --out DIR --world-size 8
  deepseek-v41 plan --config CKPT --world-size 64

CKPT is a folder in the format of the DeepSeek-V4.1-Flash release: config.json, tokenizer.json and safetensors files.
Exit codes: 0 done, 1 a check failed, 2 the input cannot be used, 130 interrupted.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are errors of the package, so that all of them look alike."""

    def error(self, message: str) -> NoReturn:
        """Raises RequestError; argparse would print the usage and leave."""
        raise RequestError(f"{message} (see '{self.prog} --help')")


def build_parser() -> Parser:
    """The command line of all commands."""
    parser = Parser(
        prog="deepseek-v41",
        description="DeepSeek-V4.1-Flash on plain CPU: generate and score text, look into checkpoints, check the numbers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (the process's by default) and returns the exit code.

    What a user can cause ends in one line ``error: ...`` on stderr and code 2. A reader that closes the output early is
    no error.
    """
    if sys.stdout is None:
        print("error: output: standard output is closed; send it to a file or a terminal", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        args = build_parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 0
    except (DeepseekV41Error, KeyboardInterrupt, MemoryError, OSError) as error:
        code, words = explained(error)
        if isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        elif not is_silent():
            print(words if isinstance(error, KeyboardInterrupt) else f"error: {words}", file=sys.stderr)
    return int(code)
