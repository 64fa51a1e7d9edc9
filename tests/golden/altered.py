# SPDX-License-Identifier: Apache-2.0
"""Copies of a checkpoint in which something is wrong, and how far a wrong model is from the golden logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from driving import largest_error
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import Block, DeepseekV41Model
from modeling_deepseek_v41.verify.golden_set import GoldenSet
from modeling_deepseek_v41.verify.run import teacher_forced

PROMPT, STEPS = 40, 4
"""The rows that a wrong model is judged by: a prompt that is longer than the window and than index_topk groups, then
steps that complete a group and steps that complete none."""


def altered_checkpoint(
    source: Path, target: Path, tensors: dict[str, Callable[[Tensor], None]] | None = None, **config: Any
) -> Path:
    """``source`` again in ``target``, each tensor named in ``tensors`` changed in place, text config keys replaced."""
    target.mkdir()
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    content["text_config"] |= config
    (target / "config.json").write_text(json.dumps(content), encoding="utf-8")
    shards = json.loads((source / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    changed = {shards[name] for name in tensors or {}}
    for file in source.iterdir():
        if file.name in changed:
            stored = load_file(file)
            for name, change in (tensors or {}).items():
                if shards[name] == file.name:
                    change(stored[name])
            save_file(stored, target / file.name)
        elif file.name != "config.json":
            (target / file.name).symlink_to(file)
    return target


def zero(tensor: Tensor) -> None:
    """Every stored byte 0: the value 0, and for a scale 2^-127."""
    tensor.view(torch.uint8).zero_()


def with_own_mix(block: Block, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A block's arguments with its own attention's pre in the place of the previous sublayer's."""
    x, pre_mix, *rest = args
    return x, block.hc_attn(x, pre_mix, block.attn_norm.weight)[1], *rest


def load(folder: Path, numerics: str = "fp32") -> DeepseekV41Model:
    """The model in ``folder``."""
    return load_model(folder, numerics, progress=False)


def error(model: DeepseekV41Model, golden: GoldenSet, mode: str = "f32") -> float:
    """The largest relative error of PROMPT's logits over its first STEPS rows: 1e-5 is the golden test's tolerance."""
    prompt = next(prompt for prompt in golden.prompts(mode, model.config) if prompt.length == PROMPT)
    return largest_error(teacher_forced(model, prompt, STEPS).logits, prompt.logits[:, :STEPS])
