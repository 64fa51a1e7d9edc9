# SPDX-License-Identifier: Apache-2.0
"""``deepseek-v41 inspect``: what a checkpoint is made of."""

import argparse
import dataclasses
import sys
from typing import Any

from rich.table import Table

from ..checkpoint import Checkpoint, GroupRow, summarize
from ..config import ModelConfig, load_config
from ..progress import format_bytes
from .config_summary import rows, unknown_keys_warning
from .output import console, print_json

EPILOG = """\
Names, types and shapes of all tensors are compared with what config.json asks for; weights are not read.

examples:
  deepseek-v41 inspect CKPT
  deepseek-v41 inspect CKPT --json
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``inspect``."""
    parser = subparsers.add_parser(
        "inspect",
        help="configuration, tensors and bytes of a checkpoint",
        description="Shows the configuration and the tensors of a checkpoint, and which of them a text run uses.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder in the release's format")
    parser.add_argument("--json", action="store_true", help="one object: config, files, total_bytes, groups of tensors")


def run(args: argparse.Namespace) -> int:
    """Prints; raises the package's errors for a checkpoint that cannot be used."""
    config = load_config(args.checkpoint)
    with Checkpoint(args.checkpoint, config) as checkpoint:
        groups = summarize(checkpoint)
        files, total = [file.name for file in checkpoint.files], checkpoint.total_bytes
    warning = unknown_keys_warning(config)
    if warning:
        print(warning, file=sys.stderr)
    if args.json:
        print_json(
            {
                "config": {key: value for key, value in dataclasses.asdict(config).items() if key != "unknown_keys"},
                "ignored_config_keys": list(config.unknown_keys),
                "files": files,
                "total_bytes": total,
                "groups": [
                    {
                        "group": row.group,
                        "tensors": row.tensors,
                        "bytes": row.nbytes,
                        "dtypes": list(row.dtypes),
                        "used_by": _use(row),
                    }
                    for row in groups
                ],
            }
        )
        return 0
    out = console()
    out.print(_config_table(config))
    out.print(_group_table(groups, total))
    out.print(f"{args.checkpoint}: {len(files)} files, {format_bytes(total)}")
    return 0


def _use(row: GroupRow) -> str:
    if not row.used:
        return "nothing in a text run"
    return "the drafter only" if row.group == "drafter" else "text"


def _config_table(config: ModelConfig) -> Table:
    table = Table(title="configuration", title_justify="left", show_header=False)
    for name, words in rows(config):
        table.add_row(name, words)
    return table


def _group_table(groups: list[GroupRow], total: int) -> Table:
    table = Table(title="tensors", title_justify="left")
    table.add_column("group")
    for name in ("tensors", "bytes", "share"):
        table.add_column(name, justify="right")
    table.add_column("stored as")
    table.add_column("used by")
    for row in groups:
        share = f"{100 * row.nbytes / max(1, total):.1f} %"
        table.add_row(row.group, str(row.tensors), format_bytes(row.nbytes), share, ", ".join(row.dtypes), _use(row))
    return table
