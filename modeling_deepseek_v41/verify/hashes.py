# SPDX-License-Identifier: Apache-2.0
"""Engram table rows against the golden's: they are integers, and every one must be equal."""

import torch
from torch import Tensor

from ..engram.hashing import lookback, row_ids
from ..model import DeepseekV41Model
from .golden_set import ImagePrompt
from .parts import engrams
from .report import HashResult


def check_hashes(prompt: str, found: Tensor, golden: Tensor) -> HashResult:
    """Compares table rows [B, T, layers, columns] position by position."""
    equal = (found == golden).flatten(2).all(-1)
    return HashResult(prompt, equal.numel(), int(equal.sum()))


def check_image_hashes(model: DeepseekV41Model, image: ImagePrompt) -> HashResult:
    """The rows of a prompt with image spans, from its ids alone: look-back stops at the spans' dead positions."""
    config = model.config
    n = config.engram_max_ngram_size
    before = torch.zeros(image.ids.shape[0], n - 1, dtype=torch.int64)
    token_map = model.get_buffer("token_map")
    tokens = torch.cat([before, token_map[image.ids].long()], 1)
    alive = torch.cat([before.bool(), image.alive], 1)
    grams = lookback(tokens, alive, n, int(token_map[config.engram_pad_token_id]))
    rows = [row_ids(grams, engram.layout) for engram in engrams(model).values()]
    return check_hashes("vl", torch.stack(rows, 2), image.hashes)
