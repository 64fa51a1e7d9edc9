# SPDX-License-Identifier: Apache-2.0
"""The options of every command that runs a model, and loading it with them."""

import argparse
import dataclasses
import sys
import time

from ..checkpoint import Checkpoint, summarize
from ..config import ModelConfig, load_config
from ..experts import EXPERT_STORAGE
from ..kernels.dispatch import KERNELS
from ..loading import DEFAULT_MAX_SEQ_LEN, load_model
from ..model import DeepseekV41Model
from ..numerics import NUMERICS
from ..progress import format_bytes
from ..text import TextTokenizer, load_tokenizer
from .config_summary import one_line, unknown_keys_warning


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint whose files are checked and whose weights are not read yet: enough to refuse what cannot be served."""

    config: ModelConfig
    tokenizer: TextTokenizer
    max_seq_len: int
    weights: str
    not_used: str
    drafter: bool


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that is ready, and in words what it is and where it came from."""

    model: DeepseekV41Model
    model_line: str
    weights_line: str


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose a checkpoint and how it is computed."""
    group = parser.add_argument_group("model")
    group.add_argument("--model-path", required=True, metavar="CKPT", help="a checkpoint folder in the release's format")
    group.add_argument(
        "--numerics",
        choices=list(NUMERICS),
        default="release",
        help="the arithmetic: release is bf16 and fp8/fp4 rounding as shipped, fp32 rounds caches only, fp32_no_qdq nothing"
        " (default: release)",
    )
    group.add_argument(
        "--max-seq-len",
        type=int,
        metavar="N",
        help=f"positions to make room for, prompt and new tokens together (default: what the checkpoint allows, at most"
        f" {DEFAULT_MAX_SEQ_LEN})",
    )
    group.add_argument(
        "--experts",
        choices=EXPERT_STORAGE,
        default="decoded",
        help="how routed experts are kept in memory: decoded is faster, bytes takes a quarter; fp8_exact"
        " is for the NKI kernels (default: decoded)",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="what computes on the CPU: compiled loops (numba), or PyTorch alone (torch); auto is numba if installed",
    )


def open_checkpoint(args: argparse.Namespace, drafter: bool = False) -> Opened:
    """Opens the checkpoint that ``args`` name, in little time whatever its size; raises the package's errors.

    ``drafter``: whether its DSpark drafter is wanted too.
    """
    config = load_config(args.model_path)
    warning = unknown_keys_warning(config)
    if warning:
        print(warning, file=sys.stderr)
    tokenizer = load_tokenizer(args.model_path, config)
    with Checkpoint(args.model_path, config) as checkpoint:
        groups = summarize(checkpoint)
        weights = f"{args.model_path}: {len(checkpoint.files)} files, {format_bytes(checkpoint.total_bytes)}"
    unread = [row for row in groups if row.group == "vision" or (row.group == "drafter" and not drafter)]
    not_used = ", ".join(f"{row.group} ({row.tensors} tensors, {format_bytes(row.nbytes)})" for row in unread)
    allowed = min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
    length = allowed if args.max_seq_len is None else args.max_seq_len
    return Opened(config, tokenizer, length, weights, not_used, drafter)


def load(args: argparse.Namespace, opened: Opened) -> Loaded:
    """Reads the weights, with a progress bar on stderr; raises the package's errors."""
    began = time.perf_counter()
    model = load_model(args.model_path, args.numerics, opened.max_seq_len, args.experts, args.kernels, drafter=opened.drafter)
    weights = f"{opened.weights}, loaded in {time.perf_counter() - began:.1f} s"
    if opened.not_used:
        weights += f"; not used: {opened.not_used}"
    numerics = (
        f"{args.numerics} numerics, {args.experts} experts, {model.numerics.ops.name} kernels, max_seq_len {model.max_seq_len}"
    )
    return Loaded(model, f"{one_line(opened.config)}; {numerics}", weights)
