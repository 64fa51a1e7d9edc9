# SPDX-License-Identifier: Apache-2.0
"""The model's modules that a verification watches, by their types."""

from typing import cast

from ..engram.layer import Engram
from ..model import Block, DeepseekV41Model


def blocks(model: DeepseekV41Model) -> dict[str, Block]:
    """Every block by the checkpoint's name for it: layers.0, ... and, where the model has its drafter, mtp.0, ..."""
    named = {f"layers.{layer}": block for layer, block in enumerate(model.blocks)}
    drafter = model.drafter
    return named | ({f"mtp.{stage}": block for stage, block in enumerate(drafter.stages)} if drafter is not None else {})


def engrams(model: DeepseekV41Model) -> dict[int, Engram]:
    """The engram of each layer that has one, in the order of engram_layer_ids."""
    return {layer: cast(Engram, model.layers[layer].get_submodule("engram")) for layer in model.config.engram_layer_ids}
