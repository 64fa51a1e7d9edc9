# SPDX-License-Identifier: Apache-2.0
"""From a release-format folder, or rank files, to a model: strict, streaming, every tensor either read or named as unused."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint.rank import RankCheckpoint, Source
from .checkpoint.reader import Checkpoint
from .config import ModelConfig, load_config
from .dspark.drafter import Drafter
from .dspark.step import draft_and_verify
from .engram.token_map import token_map
from .errors import RequestError
from .expert_bank import ExpertStorage, exceptions_of
from .linear import fill
from .model import DRAFTER, DeepseekV41Model
from .numerics import Numerics, numerics_by_name
from .parallel import SINGLE, Parallel
from .rank_loading import load_rank
from .rope import rope_table
from .shard_manifest import is_sharded, made_for
from .shard_plan import ShardPlan
from .state import allocate

DEFAULT_MAX_SEQ_LEN = 8192
"""Positions to allocate state for where the caller does not say; the release's configuration allows 1,048,576."""


def load_model(
    folder: str | Path,
    numerics: str = "release",
    max_seq_len: int | None = None,
    expert_weight_format: str = "bf16",
    kernels: str = "auto",
    progress: bool = True,
    drafter: bool = False,
    parallel: Parallel = SINGLE,
    expert_exception_rows: int | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> DeepseekV41Model:
    """Reads the text backbone, with ``drafter`` also its DSpark drafter, from ``folder``: a checkpoint, or rank files.

    ``numerics``: the arithmetic, release, fp32 or fp32_no_qdq. ``max_seq_len``: positions that state and rotary tables
    are made for, at most the configuration's max_position_embeddings and by default at most 8,192. ``kernels``: auto,
    torch, numba, whose loops are compiled here, or nki (kernels/dispatch.py). ``expert_weight_format``: bf16, fp4_bytes or
    fp8_exact, the latter with room for ``expert_exception_rows`` (expert_bank.py); with ``progress`` it is said how many
    were needed.
    Raises ConfigError, CheckpointError or RequestError naming file, key or tensor. The vision tower's tensors, and the
    drafter's where it is not asked for, are checked but not read. ``parallel``: the ranks that compute the model together;
    each calls this and reads its own parts (shard_plan.py). Rank files (sharding.py) must have been made with the same
    ``parallel.layout``, ``numerics`` and options of experts. ``weight_dtype``: what linears are kept in (model.py).
    """
    sharded, config = is_sharded(folder), load_config(folder)
    arithmetic = numerics_by_name(numerics)
    limit = config.max_position_embeddings
    length = min(limit, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    if type(length) is not int or not 1 <= length <= limit:
        raise RequestError(f"max_seq_len: expected 1 to max_position_embeddings {limit} of {config.source}, found {length!r}")
    if drafter and not config.num_nextn_predict_layers:
        raise RequestError(f"drafter: {config.source} has num_nextn_predict_layers 0, so the checkpoint holds no drafter")
    model = build_model(
        config, arithmetic, length, expert_weight_format, kernels, drafter, parallel, expert_exception_rows, weight_dtype
    )
    shown = progress and parallel.rank == 0
    if sharded:
        experts = ExpertStorage(expert_weight_format, expert_exception_rows)
        load_rank(model, Path(folder), made_for(config, parallel.layout, arithmetic, experts), parallel.rank, shown)
    else:
        plan = ShardPlan(config, parallel.layout, parallel.rank)
        checkpoint = Checkpoint(folder, config, progress=shown)
        load_weights(model, RankCheckpoint(checkpoint, plan))
        checkpoint.finish(lambda name: not plan.holds(name) or (not drafter and name.startswith("mtp.")))
    if shown and expert_weight_format == "fp8_exact":
        print("fp8_exact: {} of {} rows of this rank's experts are kept in bf16".format(*exceptions_of(model)), file=sys.stderr)
    for name, table in tables(folder, config, length).items():
        setattr(model, name, table)
    if model.drafter is not None:
        model.drafter.rope_plain = model.rope_plain
    model.numerics.ops.lay_out(model)
    if model.numerics.ops.name == "numba":
        warm_up(model)
    return model.eval()


def tables(folder: str | Path, config: ModelConfig, max_seq_len: int) -> dict[str, Tensor]:
    """What a model has beside its weights: rope_plain, rope_compressed and token_map, made of the tokenizer in ``folder``."""
    no_engram = torch.zeros(config.vocab_size, dtype=torch.int32)
    return {
        "rope_plain": rope_table(config, False, max_seq_len),
        "rope_compressed": rope_table(config, True, max_seq_len),
        "token_map": token_map(folder, config) if config.engram_layer_ids else no_engram,
    }


def build_model(
    config: ModelConfig,
    numerics: Numerics,
    max_seq_len: int,
    expert_weight_format: str = "bf16",
    kernels: str = "torch",
    drafter: bool = False,
    parallel: Parallel = SINGLE,
    expert_exception_rows: int | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> DeepseekV41Model:
    """The model, with ``drafter`` also its drafter, of one rank on the meta device: names, shapes and dtypes, no values."""
    with torch.device("meta"):
        model = DeepseekV41Model(
            config, numerics, max_seq_len, expert_weight_format, kernels, parallel, expert_exception_rows,
            weight_dtype=weight_dtype,
        )  # fmt: skip
        if drafter:
            model.add_drafter(Drafter(config, model.numerics, expert_weight_format, parallel, expert_exception_rows))
    return model


def warm_up(model: DeepseekV41Model) -> None:
    """Runs one token, a short prompt and a speculative step where there is a drafter.

    So loops are compiled, or read from their cache, before anything is timed.
    """
    state = allocate(model.state_spec(1))
    zero, rank, read = torch.zeros(1, dtype=torch.int64), model.parallel.rank_tensor(), model.max_seq_len
    with torch.inference_mode():
        for tokens in (1, model.numerics.exact_tokens + 1):
            ids = zero.expand(1, tokens)
            model(ids, zero, torch.tensor([tokens]), zero, rank, *state, read_len=read)
        if model.drafter is not None:
            one = zero + 1
            draft_and_verify(model, model.drafter, zero, zero, one, zero, rank, state, num_draft_tokens=1, read_len=read)


def load_weights(model: nn.Module, checkpoint: Source, done: Callable[[nn.Module], None] = lambda module: None) -> None:
    """Fills ``model``, whose module names are the checkpoint's, but for the drafter's, which are behind ``drafter.``.

    A module with a ``load`` method reads its own tensors and decides how it keeps them; other parameters are read under
    their own name and kept in the parameter's dtype, which holds the stored values exactly. ``done`` is called with every
    module that is filled.
    """
    for name, module in model.named_modules():
        path = name.removeprefix(DRAFTER)
        if hasattr(module, "load"):
            module.load(checkpoint, path)
        else:
            for key, parameter in list(module.named_parameters(recurse=False)):
                stored = checkpoint.tensor(f"{path}.{key}" if path else key)
                fill(module, key, stored.to(parameter.dtype, copy=parameter.is_meta))
        done(module)
