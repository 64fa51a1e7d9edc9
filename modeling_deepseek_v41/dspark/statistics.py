# SPDX-License-Identifier: Apache-2.0
"""What speculation did: how many tokens a step gave, which drafts were kept, and whether the drafter knew."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

BANDS = 10
"""Bands of equal width that sigmoid(confidence), from 0 to 1, is sorted into."""


@dataclasses.dataclass
class SpeculationStats:
    """Counts over the steps of any number of sequences; one sequence in one step counts as one step.

    A draft is judged where all drafts before it in its block were kept and the text did not end before it: only then does
    the backbone's word on it mean anything.
    """

    num_draft_tokens: int
    steps: int = 0
    tokens: int = 0
    """New tokens that became part of a text."""
    judged: list[int] = dataclasses.field(default_factory=list)
    """[num_draft_tokens]: drafts judged, by their place in the block."""
    accepted: list[int] = dataclasses.field(default_factory=list)
    """[num_draft_tokens]: those of them that were kept."""
    band_judged: list[int] = dataclasses.field(default_factory=lambda: [0] * BANDS)
    """[BANDS]: drafts judged, by sigmoid(confidence)."""
    band_accepted: list[int] = dataclasses.field(default_factory=lambda: [0] * BANDS)
    """[BANDS]: those of them that were kept."""

    def __post_init__(self) -> None:
        self.judged = self.judged or [0] * self.num_draft_tokens
        self.accepted = self.accepted or [0] * self.num_draft_tokens

    def record(self, confidence: Sequence[float], found: int, taken: int) -> None:
        """One step of one sequence, which verified as many drafts as ``confidence``, raw, has entries.

        ``found``: new tokens of the step, the accepted drafts and one more. ``taken``: how many of them the text took.
        """
        accepted = min(found - 1, taken)
        rejected = taken == found and accepted < len(confidence)
        self.steps += 1
        self.tokens += taken
        for place in range(accepted + rejected):
            share = 1 / (1 + math.exp(-max(-700.0, min(700.0, confidence[place]))))
            band = min(int(share * BANDS), BANDS - 1)
            kept = place < accepted
            self.judged[place] += 1
            self.accepted[place] += kept
            self.band_judged[band] += 1
            self.band_accepted[band] += kept

    @property
    def tokens_per_step(self) -> float | None:
        """New tokens per step of a sequence, 1 without speculation; None before the first step."""
        return self.tokens / self.steps if self.steps else None

    def calibration(self) -> list[tuple[float, float, int, float]]:
        """(from, to, drafts judged, share of them kept) of every band of sigmoid(confidence) that has drafts.

        A calibrated drafter has shares between ``from`` and ``to``.
        """
        counts = zip(range(BANDS), self.band_judged, self.band_accepted, strict=True)
        return [(band / BANDS, (band + 1) / BANDS, judged, kept / judged) for band, judged, kept in counts if judged]

    def as_dict(self) -> dict[str, Any]:
        """The counts and what follows from them, for JSON."""
        bands = [
            {"from": low, "to": high, "judged": judged, "accepted_share": share}
            for low, high, judged, share in self.calibration()
        ]
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_step": self.tokens_per_step,
            "judged": list(self.judged),
            "accepted": list(self.accepted),
            "confidence_bands": bands,
        }
