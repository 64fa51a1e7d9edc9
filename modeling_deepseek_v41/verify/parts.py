# SPDX-License-Identifier: Apache-2.0
"""The model's modules that a verification watches, by their types."""

from typing import cast

from ..engram.layer import Engram
from ..model import Block, DeepseekV41Model


def blocks(model: DeepseekV41Model) -> list[Block]:
    """The layers of ``model``, first to last."""
    return [cast(Block, layer) for layer in model.layers]


def engrams(model: DeepseekV41Model) -> dict[int, Engram]:
    """The engram of each layer that has one, in the order of engram_layer_ids."""
    return {layer: cast(Engram, model.layers[layer].get_submodule("engram")) for layer in model.config.engram_layer_ids}
