# SPDX-License-Identifier: Apache-2.0
"""What the sequences of a batch have left behind, between calls of the Hugging Face model."""

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import RequestError
from ..model import DeepseekV41Model
from ..state import allocate

CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The cache's name in transformers' outputs, which newer versions changed."""


class DeepseekV41Cache:
    """State of ``batch_size`` sequences: the model's declared state tensors and how far each sequence has come.

    ``lengths``: real tokens of each sequence that the state holds. ``columns``: columns of the padded batch that they came
    from. A sequence that ``generate`` ended holds the tokens before its end token. Passed as ``past_key_values`` it is
    continued in place; ``copy.deepcopy`` gives an independent continuation. It is not one of transformers' cache classes:
    the state is no list of keys and values, and it can be neither cropped nor reordered.
    """

    is_compileable = False

    def __init__(self, backbone: DeepseekV41Model, batch_size: int):
        self.max_seq_len = backbone.max_seq_len
        self.state = allocate(backbone.state_spec(batch_size), next(backbone.parameters()).device)
        self.lengths = [0] * batch_size
        self.columns = 0

    @property
    def batch_size(self) -> int:
        """Sequences in the batch."""
        return len(self.lengths)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the padded batch that were taken in."""
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The most tokens that a sequence can have."""
        return self.max_seq_len

    def reserve(self, row: int, tokens: int) -> None:
        """Raises RequestError unless sequence ``row`` has room for ``tokens`` more tokens."""
        total = self.lengths[row] + tokens
        if total > self.max_seq_len:
            raise RequestError(
                f"row {row}: {self.lengths[row]} tokens so far and {tokens} more make {total}, max_seq_len is"
                f" {self.max_seq_len}; shorten the input or load the model with a larger max_seq_len"
            )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: there is no beam search."""
        raise RequestError("reorder_cache: this model's cache cannot be reordered, there is no beam search; use num_beams=1")

    def crop(self, max_length: int) -> None:
        """Refused: the state of removed tokens is gone."""
        raise RequestError("crop: this model's cache cannot be cropped; copy.deepcopy it before the tokens that may be removed")
