# SPDX-License-Identifier: Apache-2.0
"""``deepseek-v41 shard``: a checkpoint as one file of ready weights per rank."""

import argparse
import time
from typing import Any

from ..config import load_config
from ..progress import format_bytes
from ..shard_manifest import WEIGHTS
from ..sharding import shard_checkpoint
from .layout_options import add_layout_arguments, chosen_layout
from .loaded import add_storage_arguments

EPILOG = """\
DIR gets weights/tp{rank}_sharded_checkpoint.safetensors, where NxD Inference looks for them, weights/manifest.json and the
checkpoint's configuration and tokenizer files: it takes the checkpoint's place as --model-path of other commands, which must
get the same options of ranks, experts and numerics. A run that was broken off goes on when it is started again.

examples:
  deepseek-v41 shard --model-path CKPT --out DIR --world-size 64 --mesh trn2 --expert-weight-format fp8_exact
  deepseek-v41 shard --model-path CKPT --out DIR --world-size 1
  deepseek-v41 generate --model-path DIR --prompt "Once upon a time"
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``shard``."""
    parser = subparsers.add_parser(
        "shard",
        help="write one file of ready weights per rank",
        description="Divides a checkpoint among ranks, once, so that each loads its own file and decodes nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    group = parser.add_argument_group("model")
    group.add_argument("--model-path", required=True, metavar="CKPT", help="a checkpoint folder in the release's format")
    group.add_argument("--out", required=True, metavar="DIR", help="the folder to write; an empty one, or one to go on with")
    add_storage_arguments(group)
    add_layout_arguments(parser, 1, "ranks to write files for (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Shards and prints what was written; raises the package's errors for what cannot be used."""
    began = time.perf_counter()
    layout = chosen_layout(args, load_config(args.model_path), args.world_size)
    manifest = shard_checkpoint(
        args.model_path, args.out, layout, args.numerics, args.expert_weight_format, args.expert_exception_rows
    )
    each = max(file.bytes for file in manifest.files.values())
    print(
        f"{args.out}/{WEIGHTS}: {len(manifest.files)} rank files of {format_bytes(each)}, {time.perf_counter() - began:.1f} s"
    )
    if args.expert_weight_format == "fp8_exact":
        most = max(file.exception_rows for file in manifest.files.values())
        print(f"rows of experts that are kept in bf16 because fp8 cannot hold them: at most {most} on a rank")
    return 0
