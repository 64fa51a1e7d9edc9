# SPDX-License-Identifier: Apache-2.0
"""Writes a random checkpoint in the release's format, for any configuration and seed.

    python examples/make_tiny_checkpoint.py --config my_config.json --out my_checkpoint --seed 1

The weights are noise and so is the text they generate; everything else (names, stored types, scales, index, tokenizer) is
as in the release, so that the whole package can run on it.
"""

import argparse
import json
import sys
from pathlib import Path

from modeling_deepseek_v41.checkpoint import Checkpoint, summarize
from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.errors import DeepseekV41Error
from modeling_deepseek_v41.progress import format_bytes


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Writes a random checkpoint in the release's format.")
    parser.add_argument("--config", type=Path, required=True, help="a config.json in the release's layout, or a flat one")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to; it must not hold weights yet")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same weights (default: 0)")
    parser.add_argument("--shard-bytes", type=int, default=1 << 30, help="the most bytes in one file (default: 1 GiB)")
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training a small one")
    parser.add_argument("--corpus", type=Path, help="a text file to train the tokenizer on (default: a built-in text)")
    return parser.parse_args()


def main() -> int:
    """Writes the checkpoint, reads its headers back and prints what it is made of."""
    arguments = parse_arguments()
    try:
        corpus = arguments.corpus.read_text(encoding="utf-8") if arguments.corpus else None
        write_checkpoint(
            json.loads(arguments.config.read_text(encoding="utf-8")),
            arguments.out,
            arguments.seed,
            shard_bytes=arguments.shard_bytes,
            tokenizer=arguments.tokenizer,
            corpus=corpus,
            progress=True,
        )
        with Checkpoint(arguments.out) as checkpoint:
            for row in summarize(checkpoint):
                print(f"{row.group:20} {row.tensors:7} tensors {format_bytes(row.nbytes):>10}  {', '.join(row.dtypes)}")
            size = format_bytes(checkpoint.total_bytes)
            print(f"{arguments.out}: {len(checkpoint.files)} files, {size}, seed {arguments.seed}")
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        message = error if isinstance(error, DeepseekV41Error) else f"{arguments.config}: is not valid JSON ({error})"
        print(message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
