# SPDX-License-Identifier: Apache-2.0
"""A command whose ranks fail, as a program: ``failing.py HOW [--world-size N]``; also under torchrun."""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch

from modeling_deepseek_v41.cli import failures
from modeling_deepseek_v41.cli.layout_options import add_layout_arguments
from modeling_deepseek_v41.cli.ranks import is_silent, on_ranks
from modeling_deepseek_v41.errors import DeepseekV41Error, RequestError
from modeling_deepseek_v41.parallel import Parallel

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"


def prepare(args: argparse.Namespace) -> str:
    print("prepared")
    if args.how == "unprepared":
        raise RequestError("how: cannot be prepared")
    return args.how


def execute(how: str, parallel: Parallel) -> int:
    fails = parallel.rank == (0 if how.startswith("first ") else 1)
    what = how.removeprefix("first ")
    print("started")
    parallel.world.sum(torch.ones(1))
    if fails and what == "user":
        raise RequestError("what a user\n  can cause")
    if fails and what == "fault":
        raise AssertionError("what nobody foresaw")
    if fails and what == "pipe":
        raise BrokenPipeError
    if fails and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    parallel.world.sum(torch.ones(1))
    print("done")
    return 3 if what == "code" else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.set_defaults(model_path=str(TINY))
    add_layout_arguments(parser, None, "processes")
    try:
        return on_ranks(parser.parse_args(), prepare, execute)
    except DeepseekV41Error as error:
        code, words = failures.explained(error)
        if not is_silent():
            print("error:", words, file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import failing  # so that the functions can be pickled by their module's name

    sys.exit(failing.main())
