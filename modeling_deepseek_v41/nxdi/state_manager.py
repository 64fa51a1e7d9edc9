# SPDX-License-Identifier: Apache-2.0
"""The state as NxDI holds it between calls: a flat list of parameters, inputs of a graph that it may overwrite."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..state import StateSpec, allocate


class StateManager(nn.Module):
    """What NxDI calls ``kv_mgr``. It aliases entry i of ``past_key_values`` to output i behind a graph's results."""

    def __init__(self, spec: Sequence[StateSpec]):
        super().__init__()
        self.past_key_values = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in allocate(list(spec)))

    def read(self) -> list[Tensor]:
        """The state as a forward takes it. Copies: a forward writes in place, a graph must leave its inputs as they are."""
        return [tensor.clone() for tensor in self.past_key_values]

    def store(self, tensors: Sequence[Tensor]) -> None:
        """Keeps what a forward returned; on a device the aliases do that."""
        for kept, new in zip(self.past_key_values, tensors, strict=True):
            kept.data = new

    def clear(self) -> None:
        """All zeros, as at the start. Nothing needs it: reading goes by position."""
        with torch.no_grad():
            for tensor in self.past_key_values:
                tensor.zero_()
