# SPDX-License-Identifier: Apache-2.0
"""Pearson's chi-square test of joint counts of tokens."""

import torch
from torch import Tensor


def p_value(tokens: Tensor, expected: Tensor, vocab: int) -> float:
    """How probable counts as far from ``expected`` [vocab ** T] as those of ``tokens`` [n, T] are.

    Cells that may not occur must not; cells that expect fewer than 5 are put together.
    """
    places = (tokens * vocab ** torch.arange(tokens.shape[1]).flip(0)).sum(1)
    counts, wanted = places.bincount(minlength=len(expected)).double(), expected * len(tokens)
    if counts[expected == 0].sum() > 0:
        return 0.0
    small = wanted < 5
    counts = torch.cat([counts[~small], counts[small].sum().view(1)])
    wanted = torch.cat([wanted[~small], wanted[small].sum().view(1)])
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    statistic = ((counts - wanted).square() / wanted).sum() / 2
    return 1 - torch.special.gammainc(torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64), statistic).item()
