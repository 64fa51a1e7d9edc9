# SPDX-License-Identifier: Apache-2.0
"""From the inputs of an NxDI graph to the rows of a call. Plain tensors: needs no NxDI."""

from typing import NamedTuple

import torch
from torch import Tensor


class GraphCall(NamedTuple):
    """The rows of one graph call, as ``DeepseekV41Model.forward`` takes them."""

    ids: Tensor
    start: Tensor
    length: Tensor
    slot: Tensor
    is_prompt: bool
    """Whether it reads a prompt: known from the shape alone, since decoding has one token per row."""


def graph_call(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, seq_ids: Tensor) -> GraphCall:
    """input_ids and position_ids int32 [B, T], attention_mask int32 [B, bucket], seq_ids int32 [B], -1 in inactive rows.

    Only the first position of a prompt counts: the rest may be padding, which NxDI fills with 1. In decoding a row stands
    behind all tokens of its mask; where the generation adapter passes a later position (it does for a prompt of one token
    in a padded batch), the mask is right.
    """
    seen, slot = attention_mask.long().sum(1), seq_ids.long()
    active = (slot >= 0).long()
    if input_ids.shape[1] > 1:
        return GraphCall(input_ids.long(), position_ids[:, 0].long(), seen * active, slot, True)
    start = torch.minimum(position_ids[:, 0].long(), seen)
    return GraphCall(input_ids.long(), start, active, slot, False)


def last_row(hidden: Tensor, length: Tensor) -> Tensor:
    """hidden [B, T, d] to the row of each sequence's last real token: [B, 1, d]."""
    index = (length - 1).clamp_min(0).view(-1, 1, 1)
    return hidden.gather(1, index.expand(-1, 1, hidden.shape[-1]))


def prompt_read_length(tokens: int, largest: int, seq_len: int) -> int:
    """How far a context-encoding graph of ``tokens`` reads: the largest one serves every later chunk too, so it reads all."""
    return tokens if tokens < largest else seq_len
