# SPDX-License-Identifier: Apache-2.0
"""Showing that a deviation is a QDQ rounding flip: by undoing it.

A deviation counts as explained only where the model, run again with single values rounded to the other side of a boundary
that they lie at, agrees everywhere within the tolerance.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..model import DeepseekV41Model
from .qdq_trace import Flip, QdqTrace
from .report import DraftResult, PromptResult

TRIALS = 64
"""Groups at a boundary that are tried for each flip: those of the deviation's own position first, then the nearest."""


class Deviation(NamedTuple):
    """A place where the model disagrees with the golden."""

    batch: int
    position: int
    block: str | None = None
    """The block that was given golden inputs; None for logits, which any block may have spoiled."""


def explain(trace: QdqTrace, deviations: Callable[[], list[Deviation]]) -> list[Flip] | None:
    """The flips that, undone together, leave no deviation; None where there are none such.

    ``deviations`` runs the model, inside ``trace``, and lists what is outside the tolerance, first position first.
    """
    undone: list[Flip] = []
    left, near = _run(trace, undone, deviations)
    while left:
        for flip in _candidates(near, left[0], undone):
            after, near_after = _run(trace, [*undone, flip], deviations)
            if len(after) < len(left):
                undone, left, near = [*undone, flip], after, near_after
                break
        else:
            return None
    return undone


def explain_result(
    model: DeepseekV41Model, result: PromptResult | DraftResult, deviations: Callable[[], list[Deviation]]
) -> None:
    """Makes ``result`` good where flips in ``model`` explain all ``deviations``, which run it; either way its note says so."""
    with QdqTrace(model) as trace:
        flips = explain(trace, deviations)
    if flips is None:
        result.note = "not explained by QDQ rounding flips"
        return
    result.ok = True
    result.note = "within tolerance with these roundings flipped: " + "; ".join(map(str, flips))


def _run(trace: QdqTrace, forced: list[Flip], deviations: Callable[[], list[Deviation]]) -> tuple[list[Deviation], set[Flip]]:
    trace.forced, trace.near = set(forced), set()
    left = deviations()
    return left, trace.near


def _candidates(near: set[Flip], first: Deviation, undone: list[Flip]) -> list[Flip]:
    may_explain = [
        flip
        for flip in near
        if flip not in undone
        and flip.batch == first.batch
        and flip.seen_from <= first.position
        and first.block in (None, flip.block)
    ]
    return sorted(may_explain, key=lambda flip: (flip.seen_from != first.position, flip))[:TRIALS]
