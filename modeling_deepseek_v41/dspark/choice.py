# SPDX-License-Identifier: Apache-2.0
"""How the rows of a speculative step choose tokens, as tensors."""

from typing import NamedTuple

from torch import Tensor

from ..sampling import probabilities


class Choice(NamedTuple):
    """The sampling options of B rows, as ``sampling.probabilities`` takes them; temperature 0 is greedy."""

    temperature: Tensor
    """[B] float."""
    top_k: Tensor | None = None
    """[B] int, 0 is off; None is off for all rows."""
    top_p: Tensor | None = None
    """[B] float, 1 is off; None is off for all rows."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distributions that tokens are drawn from: logits [B, T, V] fp32 to [B, T, V] fp32."""
        tokens = logits.shape[1]
        spread = [None if option is None else option.repeat_interleave(tokens) for option in self]
        temperature = self.temperature.repeat_interleave(tokens)
        return probabilities(logits.flatten(0, 1), temperature, *spread[1:]).unflatten(0, logits.shape[:2])
