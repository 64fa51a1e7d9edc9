# SPDX-License-Identifier: Apache-2.0
"""Every weight by its checkpoint name, and its value before training.

A dictionary from names to fp32 tensors, made from the list of tensors that the package expects. ``.weight`` is left off, and
a layer's experts are one tensor: ``layers.0.ffn.experts.3.w1.weight`` is row 3 of ``layers.0.ffn.experts.w1`` [E, n, k].
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from modeling_deepseek_v41.checkpoint.spec import TensorSpec, expected_tensors
from modeling_deepseek_v41.config import ModelConfig

Weights = Mapping[str, Tensor]

EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Stored(NamedTuple):
    """How one weight is stored."""

    shape: tuple[int, ...]
    """[n, k], [E, n, k] for experts, or fewer dimensions."""
    kind: str
    """fp4, fp8 (blocks of 32x32), rows (fp8, a scale per row and 32 columns), BF16 or F32."""


def stored(config: ModelConfig) -> dict[str, Stored]:
    """Shape and kind of every weight of ``config``, by its name here."""
    specs = expected_tensors(config)
    weights: dict[str, Stored] = {}
    for name, spec in specs.items():
        if spec.dtype == "F8_E8M0":
            continue
        short = name.removesuffix(".weight")
        shape = (*spec.shape[:-1], spec.shape[-1] * 2) if spec.dtype == "I8" else spec.shape
        expert = EXPERT.search(short)
        if expert:
            short, shape = EXPERT.sub(".experts.", short), (int(expert[1]) + 1, *shape)
        weights[short] = Stored(shape, _kind(short, spec, specs))
    return weights


def _kind(short: str, spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> str:
    if spec.dtype == "I8":
        return "fp4"
    if spec.dtype == "F8_E4M3":
        return "rows" if specs[f"{short}.scale"].shape[0] == spec.shape[0] else "fp8"
    return spec.dtype


def is_drafter(name: str) -> bool:
    """Whether ``name`` belongs to the DSpark drafter."""
    return name.startswith("mtp.")


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random weights, fp32 leaves that ask for a gradient; only the router's bias does not: a rule moves it, not a gradient."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, how in stored(config).items():
        value = _initial(name, how.shape, config.hc_mult, generator)
        weights[name] = value.requires_grad_(not name.endswith("gate.bias"))
    return weights


def _initial(name: str, shape: tuple[int, ...], streams: int, generator: torch.Generator) -> Tensor:
    if name.endswith(("norm", ".q_weight", ".k_weight")):
        return torch.ones(shape)
    if name.endswith("_scale"):
        return torch.full(shape, 0.5)
    if name.endswith("_base"):
        return _stream_base(streams)
    if len(shape) == 1:
        return torch.zeros(shape)
    if name.endswith("_fn"):
        deviation = 0.02
    elif name.endswith("embed"):
        deviation = 0.1 if ".engram." in name else 0.5
    else:
        deviation = shape[-1] ** -0.5
    if name.endswith((".wo_b", ".w2", "markov_head.head")):
        deviation *= 0.3
    return torch.randn(shape, generator=generator) * deviation


def _stream_base(streams: int) -> Tensor:
    """Coefficients that begin as: read the mean of the streams, write to all of them, keep each as it is."""
    pre = torch.full((streams,), -math.log(streams - 1) if streams > 1 else 4.0)
    return torch.cat([pre, torch.zeros(streams), 4 * torch.eye(streams).flatten()])
