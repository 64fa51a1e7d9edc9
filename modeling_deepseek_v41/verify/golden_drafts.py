# SPDX-License-Identifier: Apache-2.0
"""What a golden set records of the DSpark drafter for one prompt."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from .golden_error import GoldenError, check_shape, check_vocabulary

KINDS = ("draft_ids", "draft_confidence", "draft_logits")


@dataclasses.dataclass(frozen=True)
class GoldenDrafts:
    """The greedy drafts of N steps: step 0 right after the prefill, step i after the golden's id i - 1 was fed."""

    ids: Tensor
    """[B, N, k + 1] int64: the golden's id of the step, then the k tokens proposed behind it."""
    confidence: Tensor
    """[B, N, k] fp32, raw."""
    logits: Tensor
    """[B, n, k, vocab] fp32 of the steps ``logit_steps``, Markov logits included."""
    logit_steps: tuple[int, ...]
    """Empty where golden.json does not say which they are."""
    recorded: Tensor
    """[B, N] bool: the reference cannot draft at position 0, so step 0 of a prompt of one token has nothing."""
    agree: Tensor | None
    """[B, N] share of ids that the reference's own noise leaves as they are, where the set records it."""


def read_drafts(
    file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], generated: Tensor, length: int, config: ModelConfig,
    agree: Tensor | None,
) -> GoldenDrafts | None:  # fmt: skip
    """The drafts of prompt p``length`` among the ``tensors`` of ``file``, checked against ``config``.

    ``facts``: the content of golden.json beside ``file``. ``generated`` [B, N]: the prompt's ids. None where the set has no
    drafts of the prompt or the checkpoint no drafter. Raises GoldenError where a part is missing or does not fit.
    """
    if not config.num_nextn_predict_layers:
        return None
    keys = {kind: f"p{length}.{kind}" for kind in KINDS}
    missing = [key for key in keys.values() if key not in tensors]
    if len(missing) == len(keys):
        return None
    if missing:
        raise GoldenError(f"{file}: {missing[0]} is missing; copy the golden set again")
    ids, confidence, logits = (tensors[keys[kind]] for kind in KINDS)
    (batch, steps), block = generated.shape, config.dspark_block_size
    check_shape(file, keys["draft_ids"], ids, (batch, steps, block + 1))
    check_shape(file, keys["draft_confidence"], confidence, (batch, steps, block))
    logit_steps = _logit_steps(file.parent / "golden.json", facts, steps)
    if logit_steps is None:
        logit_steps, logits = (), torch.zeros(batch, 0, block, config.vocab_size)
    check_shape(file, keys["draft_logits"], logits, (batch, len(logit_steps), block, config.vocab_size))
    check_vocabulary(file, keys["draft_ids"], ids, config)
    recorded = (ids >= 0).all(-1)
    first = 1 if length == 1 else 0
    if not recorded[:, first:].all():
        step = first + int((~recorded[:, first:]).any(0).int().argmax())
        raise GoldenError(f"{file}: {keys['draft_ids']} holds no token ids at step {step}; copy the golden set again")
    return GoldenDrafts(ids, confidence.float(), logits.float(), logit_steps, recorded, agree)


def _logit_steps(file: Path, facts: Mapping[str, Any], steps: int) -> tuple[int, ...] | None:
    found = facts.get("draft_logit_steps")
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(step) is int and 0 <= step < steps for step in found):
        raise GoldenError(
            f"{file}: draft_logit_steps: expected a list of steps, each 0 to {steps - 1}, found {found!r}; copy the golden set"
            " again"
        )
    return tuple(found)
