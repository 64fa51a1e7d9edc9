# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.train_tiny TEXT --out FOLDER``: trains, writes, checks and measures."""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from modeling_deepseek_v41.checkpoint.folder import fit_engram, write_files
from modeling_deepseek_v41.checkpoint.tiny_tokenizer import make_tokenizer
from modeling_deepseek_v41.checkpoint.writer import write_shards
from modeling_deepseek_v41.config import config_from_dict
from modeling_deepseek_v41.engram.token_map import compress_vocabulary
from modeling_deepseek_v41.errors import DeepseekV41Error

from .agreement import check_agreement
from .evaluate import evaluate
from .quantise import checkpoint_tensors
from .text import encode, first_lines, read_text
from .training import Corpus, train_backbone, train_drafter
from .weights import initial_weights, stored

CONFIG = Path(__file__).with_name("config.json")
"""What is trained. Its engram_num_embeddings and engram_compressed_vocab_size follow from the text's tokenizer."""

HELD_OUT_PIECE = 22_000
"""Characters of the held-out text that are kept beside the checkpoint and measured: about what one sequence holds."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_tiny", description="Trains a tiny DeepSeek-V4.1 with its drafter on a text."
    )
    parser.add_argument("text", type=Path, help="a UTF-8 text of at least 200 KB, in lines")
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder: ckpt/ and held_out.txt go there")
    parser.add_argument("--steps", type=int, default=640, help="steps of 2,048 tokens for the backbone (default: 640)")
    parser.add_argument("--drafter-steps", type=int, default=350, help="steps for the drafter (default: 350)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the text (default: 0)")
    return parser.parse_args()


def train(text_file: Path, out: Path, steps: int, drafter_steps: int, seed: int) -> None:
    """Does all of it; raises DeepseekV41Error where an argument cannot be used."""
    if min(steps, drafter_steps) < 1:
        raise DeepseekV41Error(f"steps: expected 1 or more of each kind, found {steps} and {drafter_steps}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DeepseekV41Error(f"{out}: is not an empty folder; give a new one")
    text = read_text(text_file)
    out.mkdir(parents=True, exist_ok=True)
    content = json.loads(CONFIG.read_text(encoding="utf-8"))
    config = config_from_dict(content, source=str(CONFIG))
    tokenizer = make_tokenizer(config, text.train)
    fit_engram(content["text_config"], tokenizer, config)
    config = config_from_dict(content, source=str(CONFIG))
    ids = encode(tokenizer, text.train)
    token_map = torch.from_numpy(compress_vocabulary(tokenizer, config.vocab_size)[0])
    corpus = Corpus(ids, config.bos_token_id or 0, len(text.train.encode()) / ids.numel(), token_map)
    weights, kinds = initial_weights(config, seed), stored(config)
    count = sum(weight.numel() for weight in weights.values())
    print(f"text: {ids.numel()} tokens of {corpus.bytes_per_token:.2f} bytes; model: {count} weights", flush=True)
    train_backbone(weights, config, corpus, steps, seed)
    train_drafter(weights, config, corpus, drafter_steps, seed)
    folder = out / "ckpt"
    write_shards(checkpoint_tensors(weights, config, kinds), folder)
    write_files(folder, content, config, tokenizer)
    held_out = first_lines(text.held_out, HELD_OUT_PIECE)
    (out / "held_out.txt").write_text(held_out, encoding="utf-8")
    print(check_agreement(folder, weights, encode(tokenizer, held_out)[:240], token_map), flush=True)
    for line in evaluate(folder, held_out):
        print(line)


def main() -> int:
    """Runs ``train`` on the command line's arguments; user errors go to stderr."""
    arguments = parse_arguments()
    began, worked = time.perf_counter(), time.process_time()
    try:
        train(arguments.text, arguments.out, arguments.steps, arguments.drafter_steps, arguments.seed)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except DeepseekV41Error as error:
        print(error, file=sys.stderr)
        return 1
    minutes, busy = (time.perf_counter() - began) / 60, (time.process_time() - worked) / 60
    print(f"{arguments.out}: written; {minutes:.1f} minutes, {busy:.1f} of processor time, seed {arguments.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
