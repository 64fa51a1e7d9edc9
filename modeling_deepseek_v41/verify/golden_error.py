# SPDX-License-Identifier: Apache-2.0
"""What is said of a golden set that cannot be used."""

from pathlib import Path

from torch import Tensor

from ..config import ModelConfig
from ..errors import DeepseekV41Error


class GoldenError(DeepseekV41Error):
    """A golden set that cannot be read, or that belongs to another checkpoint."""


def check_shape(file: Path, key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises GoldenError where ``key`` of ``file`` has another shape than the checkpoint's configuration asks for."""
    if tuple(tensor.shape) != shape:
        raise GoldenError(
            f"{file}: {key} has shape {list(tensor.shape)}, the checkpoint's configuration asks for {list(shape)};"
            " give the checkpoint that this set was made from"
        )


def check_vocabulary(file: Path, key: str, ids: Tensor, config: ModelConfig) -> None:
    """Raises GoldenError where ``key`` of ``file`` holds a token id that ``config`` does not have."""
    largest = int(ids.max())
    if largest >= config.vocab_size:
        raise GoldenError(
            f"{file}: {key} holds id {largest}, vocab_size of {config.source} is {config.vocab_size};"
            " give the checkpoint that this set was made from"
        )
