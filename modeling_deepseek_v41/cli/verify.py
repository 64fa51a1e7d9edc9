# SPDX-License-Identifier: Apache-2.0
"""``deepseek-v41 verify``: is the model on this machine the release's model, number by number?"""

import argparse
from typing import Any

from ..kernels.dispatch import KERNELS
from ..verify.check import verify
from ..verify.golden_set import MODES
from ..verify.table import print_report
from .output import console, print_json

DESCRIPTION = """\
Runs a checkpoint against a golden set, which holds the outputs of the release's reference on it: every prompt's greedy ids
and logits, engram table rows and, where the set has them, the DSpark drafter's drafts and the tensors of every layer.
"""

EPILOG = """\
Modes: f32 pins the mathematics, f32_noq the same without any rounding of caches, ref the shipped arithmetic. Relative error
is max|a-b| / max|b| over one row of logits, or over the confidence of one block of drafts. What a set holds and this version
does not check is said.

Exit codes: 0 within the tolerances, 1 outside, 2 something cannot be read.

examples:
  deepseek-v41 verify --model-path tests/data/golden/tiny_a/ckpt --golden tests/data/golden/tiny_a
  deepseek-v41 verify --model-path CKPT --golden DIR --mode f32 --json
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``verify``."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a checkpoint's model with golden outputs",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--model-path", required=True, metavar="CKPT", help="a checkpoint folder in the release's format")
    parser.add_argument("--golden", required=True, metavar="DIR", help="the golden set that was made from this checkpoint")
    parser.add_argument("--mode", choices=list(MODES), help="check this mode only (default: every mode that the set has)")
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default="torch",
        help="the implementation of the operations to check (default: torch, whose sums come in the reference's order)",
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Verifies and prints; raises the package's errors for what cannot be used."""
    report = verify(args.model_path, args.golden, args.mode, args.kernels, progress=not args.json)
    if args.json:
        print_json(report.as_dict())
    else:
        print_report(report, console())
    return 0 if report.ok else 1
