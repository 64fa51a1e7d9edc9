# SPDX-License-Identifier: Apache-2.0
"""From a release-format folder to a model: strict, streaming, every tensor either read or named as unused."""

from pathlib import Path

import torch
from torch import nn

from .checkpoint.rank import RankCheckpoint, Source
from .checkpoint.reader import Checkpoint
from .config import load_config
from .dspark.drafter import Drafter
from .dspark.step import draft_and_verify
from .engram.token_map import token_map
from .errors import RequestError
from .linear import fill
from .model import DeepseekV41Model
from .numerics import numerics_by_name
from .parallel import SINGLE, Parallel
from .rope import rope_table
from .shard_plan import ShardPlan
from .state import allocate

DEFAULT_MAX_SEQ_LEN = 8192
"""Positions to allocate state for where the caller does not say; the release's configuration allows 1,048,576."""


def load_model(
    folder: str | Path,
    numerics: str = "release",
    max_seq_len: int | None = None,
    expert_storage: str = "decoded",
    kernels: str = "auto",
    progress: bool = True,
    drafter: bool = False,
    parallel: Parallel = SINGLE,
) -> DeepseekV41Model:
    """Reads the text backbone, with ``drafter`` also its DSpark drafter, from ``folder``.

    ``numerics``: the arithmetic, release, fp32 or fp32_no_qdq. ``max_seq_len``: positions that state and rotary tables
    are made for, at most the configuration's max_position_embeddings and by default at most 8,192. ``expert_storage``:
    decoded or bytes, or fp8_exact for NKI kernels (experts.py); ``kernels``: auto, torch or numba (kernels/dispatch.py), whose
    loops are compiled here.
    Raises ConfigError, CheckpointError or RequestError naming file, key or tensor. The vision tower's tensors, and the
    drafter's where it is not asked for, are checked but not read. ``parallel``: the ranks that compute the model together;
    each calls this and reads its own parts (shard_plan.py).
    """
    config = load_config(folder)
    arithmetic = numerics_by_name(numerics)
    limit = config.max_position_embeddings
    length = min(limit, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    if type(length) is not int or not 1 <= length <= limit:
        raise RequestError(f"max_seq_len: expected 1 to max_position_embeddings {limit} of {config.source}, found {length!r}")
    if drafter and not config.num_nextn_predict_layers:
        raise RequestError(f"drafter: {config.source} has num_nextn_predict_layers 0, so the checkpoint holds no drafter")
    checkpoint = Checkpoint(folder, config, progress=progress and parallel.rank == 0)
    plan = ShardPlan(config, parallel.layout, parallel.rank)
    source = RankCheckpoint(checkpoint, plan)
    with torch.device("meta"):
        model = DeepseekV41Model(config, arithmetic, length, expert_storage, kernels, parallel)
    load_weights(model, source)
    model.rope_plain = rope_table(config, False, length)
    if drafter:
        with torch.device("meta"):
            stages = Drafter(config, model.numerics, expert_storage, parallel)
        load_weights(stages, source)
        stages.rope_plain = model.rope_plain
        model.add_drafter(stages)
    checkpoint.finish(lambda name: not plan.holds(name) or (not drafter and name.startswith("mtp.")))
    model.rope_compressed = rope_table(config, True, length)
    model.token_map = (
        token_map(folder, config) if config.engram_layer_ids else torch.zeros(config.vocab_size, dtype=torch.int32)
    )
    if model.numerics.ops.name == "numba":
        warm_up(model)
    return model.eval()


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


def load_weights(model: nn.Module, checkpoint: Source, prefix: str = "") -> None:
    """Fills ``model``, whose module names are the checkpoint's; ``prefix`` stands before them (such as ``mtp.0.``).

    A module with a ``load`` method reads its own tensors and decides how it keeps them; other parameters are read under
    their own name and kept in the parameter's dtype, which holds the stored values exactly.
    """
    for name, module in model.named_modules():
        path = (prefix + name).rstrip(".")
        if hasattr(module, "load"):
            module.load(checkpoint, path)
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            stored = checkpoint.tensor(f"{path}.{key}" if path else key)
            fill(module, key, stored.to(parameter.dtype, copy=True))
