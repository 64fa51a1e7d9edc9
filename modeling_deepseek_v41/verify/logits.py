# SPDX-License-Identifier: Apache-2.0
"""The logits of one prompt, end to end, against the golden's."""

import torch
from torch import Tensor

from ..model import DeepseekV41Model
from .compare import largest, relative_error
from .flips import Deviation, explain_result
from .golden_set import Prompt
from .report import PromptResult
from .run import teacher_forced

TOLERANCE = 1e-5
"""Relative error of fp32 logits: two summation orders differ by 4e-7 to 8e-7, the least of 37 known bugs by 1e-3."""

SPOILED_TOLERANCE = 1e-2
"""Relative error of rows behind a QDQ rounding flip, which moves cached values by one code."""


def check_logits(model: DeepseekV41Model, prompt: Prompt, mode: str, logits: Tensor) -> PromptResult:
    """Judges ``logits`` [B, N, vocab], which ``model`` gave for ``prompt``, by the rule of ``mode``.

    f32 and f32_noq: every row within TOLERANCE and the same greedy id; rows behind a recorded tie are left out; in f32,
    deviations that flips explain may reach SPOILED_TOLERANCE. ref: the same greedy id where the golden's margin is above
    the reference's own noise; its errors are shown, not judged.
    """
    errors = relative_error(logits, prompt.logits)
    same_id = logits.argmax(-1) == prompt.generated
    counted, note = _counted(prompt, mode)
    good = same_id & logits.isfinite().all(-1)
    if mode != "ref":
        good &= errors <= TOLERANCE
    judged = errors if mode == "ref" else errors[counted]
    result = PromptResult(
        prompt=prompt.name,
        rows=errors.numel(),
        counted=int(counted.sum()),
        ids_equal=int(same_id[counted].sum()),
        error_median=judged.median().item() if judged.numel() else None,
        error_max=largest(judged) if judged.numel() else None,
        ok=bool(good[counted].all()),
        note=note,
    )
    if mode == "f32" and TOLERANCE < largest(judged) <= SPOILED_TOLERANCE:
        _explain(model, prompt, result)
    return result


def _counted(prompt: Prompt, mode: str) -> tuple[Tensor, str]:
    """Which rows [B, N] are judged, and in words why others are not."""
    counted = torch.ones_like(prompt.generated, dtype=torch.bool)
    if mode == "ref":
        if prompt.margin is None or prompt.noise is None:
            return torch.zeros_like(counted), "golden.json records no margin and noise: no id judged"
        counted = prompt.margin > prompt.noise * prompt.logits.abs().amax(-1)
        return counted, "" if counted.all() else f"{int((~counted).sum())} rows left out: margin within the noise"
    if prompt.tie_from is not None:
        counted[:, prompt.tie_from :] = False
        return counted, f"{int((~counted).sum())} rows left out, from {prompt.tie_from} on: a recorded tie"
    return counted, ""


def _explain(model: DeepseekV41Model, prompt: Prompt, result: PromptResult) -> None:
    def deviations() -> list[Deviation]:
        logits = teacher_forced(model, prompt).logits
        good = (logits.argmax(-1) == prompt.generated) & (relative_error(logits, prompt.logits) <= TOLERANCE)
        return [Deviation(batch, prompt.length - 1 + step) for step, batch in (~good).T.nonzero().tolist()]

    explain_result(model, result, deviations)
