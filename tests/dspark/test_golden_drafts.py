# SPDX-License-Identifier: Apache-2.0
"""The one draft of the golden set that PyTorch's order of sums puts beyond the tolerance: a rounding flip, shown.

Every draft of every prompt and mode is compared in tests/golden/test_golden.py, as ``deepseek-v41 verify`` does it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_deepseek_v41.dspark.drafter import Drafts
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.verify.compare import relative_error
from modeling_deepseek_v41.verify.golden_set import GoldenSet, Prompt
from modeling_deepseek_v41.verify.qdq_trace import Flip, QdqTrace
from modeling_deepseek_v41.verify.run import teacher_forced


def drafts_of(model: DeepseekV41Model, prompt: Prompt) -> Drafts:
    """Every step's drafts, the golden's ids fed."""
    drafts = teacher_forced(model, prompt, drafter=model.drafter).drafts
    assert drafts is not None
    return drafts


def errors(drafts: Drafts, prompt: Prompt) -> Tensor:
    """The largest relative error of every step [N], over the confidence and, where they are recorded, the logits."""
    golden = prompt.drafts
    assert golden is not None
    worst = relative_error(drafts.confidence, golden.confidence)[0]
    steps = list(golden.logit_steps)
    worst[steps] = torch.maximum(worst[steps], relative_error(drafts.logits[:, steps], golden.logits)[0].amax(-1))
    return worst


@pytest.mark.parametrize(("numerics", "kernels"), [("fp32", "torch")])
def test_the_draft_beyond_the_tolerance_is_a_rounding_flip(model: DeepseekV41Model, folder: Path) -> None:
    """p100, step 24: a value of the block's KV in mtp.1 lies 6e-8 to 2e-7 of its group's largest from a rounding boundary.

    Which side it falls to depends on the order of fp32 sums. On the golden's side the step is within 2e-6, on the other side
    it alone is beyond 1e-5.
    """
    assert model.drafter is not None
    prompt, values = GoldenSet(folder.parent).prompts("f32", model.config)[-1], []
    assert prompt.length == 100
    attention = model.drafter.stages[1].attn
    plain = attention.numerics

    def noted(*args: Any) -> Tensor:
        values.append(plain.ops.normalise(*args))
        return values[-1]

    attention.numerics = dataclasses.replace(plain, ops=dataclasses.replace(plain.ops, normalise=noted))
    with QdqTrace(model) as trace:
        as_computed = errors(drafts_of(model, prompt), prompt)
        (flip,) = (flip for flip in trace.near if is_the_flip(flip))
        assert flip.distance <= 1e-6 and flip.position == prompt.length + 24 + 4
        normed = values[-1]
        trace.forced = {flip}
        other_side = errors(drafts_of(model, prompt), prompt)
    right, wrong = sorted((as_computed, other_side), key=lambda error: error[-1].item())
    assert right[-1] < 2e-6 and 1e-5 < wrong[-1] < 1e-4
    assert (as_computed[:-1] < 1e-5).all() and torch.equal(as_computed[:-1], other_side[:-1])
    attention.numerics = plain
    group = normed[:, 4:, 32:64]
    largest = group.abs().max()
    code, beyond = (model.numerics.window_kv(group + move * largest) for move in (0, flip.sign * 1e-6))
    ((*_, element),) = (code != beyond).nonzero().tolist()
    boundary = (code + beyond)[..., element] / 2
    assert abs(group[..., element] - boundary) < 1e-6 * largest


def is_the_flip(flip: Flip) -> bool:
    """The block of the last draft, its last row, the second group of 32 values."""
    return (flip.block, flip.kind, flip.start, flip.index) == ("mtp.1", "draft window KV", 124, (0, 4, 1))
