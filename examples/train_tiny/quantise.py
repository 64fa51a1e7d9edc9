# SPDX-License-Identifier: Apache-2.0
"""Weights as the release stores them: while training by a straight-through estimate, at its end for the files."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from modeling_deepseek_v41.checkpoint.spec import BLOCK, expected_tensors
from modeling_deepseek_v41.checkpoint.writer import quantize_fp4, quantize_fp8
from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.formats import decode_fp4, decode_fp8, decode_fp8_rows

from .weights import EXPERT, Stored, Weights


def straight_through(x: Tensor, quantise: Callable[[Tensor], Tensor]) -> Tensor:
    """quantise(x), with the gradient of x itself."""
    with torch.no_grad():
        difference = quantise(x) - x
    return x + difference


def as_stored(weights: Weights, kinds: dict[str, Stored]) -> dict[str, Tensor]:
    """Every weight with the value that the checkpoint will hold, and with the gradient of the weight itself."""
    return {name: straight_through(value, ROUND[kinds[name].kind]) for name, value in weights.items()}


def _fp4(weight: Tensor) -> Tensor:
    packed, scale = quantize_fp4(weight.flatten(0, -2))
    return decode_fp4(packed.view(torch.uint8), scale).view(weight.shape)


def _fp8(weight: Tensor) -> Tensor:
    return decode_fp8(*quantize_fp8(weight))


def _rows(weight: Tensor) -> Tensor:
    return decode_fp8_rows(*quantize_fp8(weight, (1, BLOCK)))


def _bf16(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "fp4": _fp4, "fp8": _fp8, "rows": _rows, "BF16": _bf16, "F32": lambda weight: weight,
}  # fmt: skip
"""A weight rounded to what its kind of storage holds."""


def checkpoint_tensors(weights: Weights, config: ModelConfig, kinds: dict[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint in its stored form, in the order and under the names that the package expects."""
    for name in expected_tensors(config):
        if name.endswith(".scale"):
            continue  # comes with its weight
        short = name.removesuffix(".weight")
        expert = EXPERT.search(short)
        key = EXPERT.sub(".experts.", short)
        weight = weights[key].detach()
        if kinds[key].kind == "BF16":
            yield name, weight.bfloat16()
        elif kinds[key].kind == "F32":
            yield name, weight
        else:
            weight = weight[int(expert[1])] if expert else weight
            block = (1, BLOCK) if kinds[key].kind == "rows" else (BLOCK, BLOCK)
            values, scale = quantize_fp4(weight) if expert else quantize_fp8(weight, block)
            yield name, values
            yield f"{short}.scale", scale
