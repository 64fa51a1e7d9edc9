# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices, Adam for the rest.

Muon (Keller Jordan and others, 2024) moves a matrix by its momentum with all singular values made about 1, which needs about
two thirds of Adam's steps here. Tables that are looked up, the head, the router and vectors keep Adam.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial whose iteration sends singular values towards 1."""

ADAM_NAMES = ("embed", "head", "gate", "_fn", "weights_proj", "confidence_head.proj")


class Optimiser:
    """Updates fp32 leaves in place from their gradients; ``rate`` scales both kinds of step."""

    def __init__(self, weights: Mapping[str, Tensor], muon: float = 0.02, adam: float = 4e-3, decay: float = 0.02):
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self.matrices = [weight for name, weight in trained.items() if weight.dim() > 1 and not name.endswith(ADAM_NAMES)]
        matrices = {id(weight) for weight in self.matrices}
        self.others = [weight for weight in trained.values() if id(weight) not in matrices]
        self.momentum = [torch.zeros_like(weight) for weight in self.matrices]
        self.muon, self.adam, self.decay = muon, adam, decay
        self._adam = torch.optim.Adam(self.others, lr=adam, betas=(0.9, 0.98), eps=1e-10, foreach=True)

    def step(self, rate: float) -> None:
        """One step at ``rate`` (1 at the height of the schedule); gradients are forgotten afterwards."""
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self._adam.param_groups[0]["lr"] = self.adam * rate
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            for weight, momentum in zip(self.matrices, self.momentum, strict=True):
                if weight.grad is None:
                    continue
                momentum.lerp_(weight.grad, 0.05)
                direction = orthogonal(torch.lerp(weight.grad, momentum, 0.95))
                size = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
                weight.mul_(1 - self.muon * rate * self.decay).add_(direction, alpha=-self.muon * rate * size)
                weight.grad = None


def orthogonal(x: Tensor, rounds: int = 5) -> Tensor:
    """x [..., n, k] with its singular values brought near 1 by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-12)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def schedule(step: int, steps: int) -> float:
    """The rate of ``step``: up over the first 4 %, level, and down to 0 over the last 60 %."""
    return min((step + 1) / (0.04 * steps + 1), 1.0, (steps - step) / (0.6 * steps))
