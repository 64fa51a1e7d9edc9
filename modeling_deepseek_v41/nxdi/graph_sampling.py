# SPDX-License-Identifier: Apache-2.0
"""Drawing a token inside a graph. Plain tensors: needs no NxDI.

A top-k's values, comparisons and sums are all it takes. The random number comes in with the call: every rank has the same, a
seed on the host repeats a text, and no device's generator is trusted. NxDI's own Sampler wants each rank's share of the logits,
where this model's ranks all have the whole, and draws on every rank by itself.
"""

import torch
from torch import Tensor

NUMBERS = 1 << 24
"""Random numbers are integers below this, so that fp32 holds their share of it exactly."""


def draw(logits: Tensor, params: Tensor, number: Tensor, candidates: int) -> Tensor:
    """A token per row: logits [B, V] fp32, params [B, 3], top_k, top_p and temperature, and number [B] int32 to ids [B] int64.

    The ``candidates`` tokens of the highest logits, equal ones by lower id, are all that can be drawn. Of these top_k are
    kept (0 or less: all), then the fewest, from the most probable on, that have the share top_p of what is left. number /
    NUMBERS chooses among them in proportion to their probability at this temperature; at temperature 0 the first is taken.
    """
    top_k, top_p, temperature = params.float().split(1, 1)
    values = logits.topk(min(candidates, logits.shape[-1]), -1).values
    place, greedy = torch.arange(values.shape[-1], device=logits.device), temperature == 0
    mass = ((values - values[:, :1]) / torch.where(greedy, 1.0, temperature)).exp()
    mass = mass * ((place == 0) | (~greedy & ((place < top_k) | (top_k <= 0))))
    before = mass.cumsum(-1) - mass
    mass = mass * ((place == 0) | (top_p >= 1) | (before < top_p * mass.sum(-1, keepdim=True)))
    reached = mass.cumsum(-1)
    share = number.float().unsqueeze(1) / NUMBERS
    passed = (reached <= share * reached[:, -1:]).sum(-1, keepdim=True)
    chosen = torch.minimum(passed, (mass > 0).sum(-1, keepdim=True) - 1)
    value = values.gather(-1, chosen)
    equal = logits == value
    found = equal & (equal.long().cumsum(-1) == chosen - (values > value).sum(-1, keepdim=True) + 1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(found, ids, logits.shape[-1] - 1).amin(-1)
