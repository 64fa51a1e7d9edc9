# SPDX-License-Identifier: Apache-2.0
"""The drafter's drafts of one prompt, step after step, against the golden's."""

from typing import cast

import torch
from torch import Tensor

from ..dspark.drafter import Drafts
from ..model import DeepseekV41Model
from .compare import largest, relative_error
from .flips import Deviation, explain_result
from .golden_drafts import GoldenDrafts
from .golden_set import Prompt
from .logits import SPOILED_TOLERANCE, TOLERANCE
from .report import DraftResult
from .run import teacher_forced


def check_drafts(model: DeepseekV41Model, prompt: Prompt, mode: str, golden: GoldenDrafts, found: Drafts) -> DraftResult:
    """Judges ``found``, which ``model``'s drafter made for ``prompt``, by the rule of ``mode``.

    f32 and f32_noq: at every recorded step the same ids, and logits and confidence within TOLERANCE; steps behind a recorded
    tie are left out; in f32, deviations that flips explain may reach SPOILED_TOLERANCE. ref, where the drafter was given the
    reference's own taps: the same ids where the reference's own noise leaves all of them as they are; its errors are shown,
    not judged.
    """
    same_ids = (found.ids == golden.ids).all(-1)
    counted, note = _counted(prompt, golden, mode)
    shown = golden.recorded if mode == "ref" else counted
    logits, confidence = _errors(found, golden)
    logits = logits[shown[:, list(golden.logit_steps)]].flatten()
    confidence = confidence[shown]
    result = DraftResult(
        prompt=prompt.name,
        steps=counted.numel(),
        counted=int(counted.sum()),
        ids_equal=int(same_ids[counted].sum()),
        logits_error_median=logits.median().item() if logits.numel() else None,
        logits_error_max=largest(logits) if logits.numel() else None,
        confidence_error_max=largest(confidence) if confidence.numel() else None,
        ok=bool(_good(found, golden, mode)[counted].all()),
        note=note,
    )
    if mode == "f32" and TOLERANCE < max(largest(logits), largest(confidence)) <= SPOILED_TOLERANCE:
        _explain(model, prompt, golden, result)
    return result


def _errors(found: Drafts, golden: GoldenDrafts) -> tuple[Tensor, Tensor]:
    """Relative errors of the logits [B, n, k] at the recorded steps, and of the confidence [B, N]."""
    logits = relative_error(found.logits[:, list(golden.logit_steps)], golden.logits)
    return logits, relative_error(found.confidence, golden.confidence)


def _good(found: Drafts, golden: GoldenDrafts, mode: str) -> Tensor:
    """Which steps [B, N] meet the rule of ``mode``."""
    good = (found.ids == golden.ids).all(-1) & found.logits.isfinite().flatten(2).all(-1) & found.confidence.isfinite().all(-1)
    if mode != "ref":
        logits, confidence = _errors(found, golden)
        good &= confidence <= TOLERANCE
        good[:, list(golden.logit_steps)] &= (logits <= TOLERANCE).all(-1)
    return good


def _counted(prompt: Prompt, golden: GoldenDrafts, mode: str) -> tuple[Tensor, str]:
    """Which steps [B, N] are judged, and in words why others are not."""
    counted, words = golden.recorded.clone(), []
    if not counted.all():
        words.append("none recorded at position 0")
    if not golden.logit_steps:
        words.append("logits not compared: golden.json records no draft_logit_steps")
    if mode == "ref":
        if prompt.taps is None:
            return torch.zeros_like(counted), "the set has no main_hidden to draft from: no id judged"
        if golden.agree is None:
            return torch.zeros_like(counted), "golden.json records no draft_noise_ids_agree: no id judged"
        noisy = counted & (golden.agree < 1)
        counted &= ~noisy
        words += [f"{int(noisy.sum())} steps left out: ids within the noise"] if noisy.any() else []
    if prompt.tie_from is not None:
        counted[:, prompt.tie_from :] = False
        words.append(f"steps from {prompt.tie_from} on left out: a recorded tie")
    return counted, "; ".join(words)


def _explain(model: DeepseekV41Model, prompt: Prompt, golden: GoldenDrafts, result: DraftResult) -> None:
    def deviations() -> list[Deviation]:
        drafts = cast(Drafts, teacher_forced(model, prompt, drafter=model.drafter).drafts)
        bad = golden.recorded & ~_good(drafts, golden, "f32")
        return [Deviation(batch, prompt.length + step) for step, batch in bad.T.nonzero().tolist()]

    explain_result(model, result, deviations)
