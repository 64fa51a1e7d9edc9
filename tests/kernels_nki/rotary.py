# SPDX-License-Identifier: Apache-2.0
"""Rotary tables for tests of kernels."""

import torch
from torch import Tensor

from modeling_deepseek_v41.rope import frequencies


def table_of(tokens: int, rotary: int) -> Tensor:
    """The rows [tokens, 2, rotary] of scattered positions."""
    angles = torch.outer(torch.arange(tokens) * 37 % 101, frequencies(rotary, 10000.0, None))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cos, cos], -1).flatten(1), torch.stack([-sin, sin], -1).flatten(1)], 1)
