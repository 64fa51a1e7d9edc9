# SPDX-License-Identifier: Apache-2.0
"""What a verification found, as data."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass
class PromptResult:
    """The logits of one prompt against the golden's: ``rows`` in the set, ``counted`` of them judged."""

    prompt: str
    rows: int
    counted: int
    ids_equal: int
    error_median: float | None
    error_max: float | None
    ok: bool
    note: str = ""


@dataclasses.dataclass
class DraftResult:
    """The drafts of one prompt against the golden's: ``steps`` in the set, ``counted`` of them judged."""

    prompt: str
    steps: int
    counted: int
    ids_equal: int
    """Steps whose draft ids are all equal."""
    logits_error_median: float | None
    logits_error_max: float | None
    confidence_error_max: float | None
    ok: bool
    note: str = ""


@dataclasses.dataclass
class KindResult:
    """One kind of per-layer tensor, pooled over layers and calls: how many elements meet ``rule``."""

    kind: str
    elements: int
    equal: int
    rule: str
    error_max: float
    ok: bool
    note: str = ""


@dataclasses.dataclass
class LayersResult:
    """Every kind of tensor of one layer file."""

    file: str
    kinds: list[KindResult]
    unused: list[str]
    """Tensors of known kinds that nothing was compared with: a reason to fail."""
    unknown: list[str]
    """Kinds of tensors that this version does not know."""
    note: str

    @property
    def ok(self) -> bool:
        """Whether every kind meets its rule and every tensor was compared."""
        return not self.unused and all(kind.ok for kind in self.kinds)


@dataclasses.dataclass
class HashResult:
    """Engram table rows of one prompt: how many positions have all of them equal."""

    prompt: str
    positions: int
    equal: int

    @property
    def ok(self) -> bool:
        """Whether every position agrees."""
        return self.equal == self.positions


@dataclasses.dataclass
class ModeResult:
    """One mode of a set. ``left_out`` says in words what was not checked and why."""

    mode: str
    numerics: str
    prompts: list[PromptResult]
    drafts: list[DraftResult]
    layers: list[LayersResult]
    hashes: list[HashResult]
    left_out: list[str]

    @property
    def ok(self) -> bool:
        """Whether everything that was checked is within its tolerance."""
        parts = (self.prompts, self.drafts, self.layers, self.hashes)
        return all(part.ok for kind in parts for part in kind)


@dataclasses.dataclass
class Report:
    """All modes that were checked."""

    model_path: str
    golden: str
    modes: list[ModeResult]

    @property
    def ok(self) -> bool:
        """Whether every mode is within its tolerances."""
        return all(mode.ok for mode in self.modes)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, each part with its verdict; None stands for an infinite error."""
        content = _finite(dataclasses.asdict(self)) | {"ok": self.ok}
        for plain, mode in zip(content["modes"], self.modes, strict=True):
            plain["ok"] = mode.ok
            for row, layers in zip(plain["layers"], mode.layers, strict=True):
                row["ok"] = layers.ok
            for row, hashes in zip(plain["hashes"], mode.hashes, strict=True):
                row["ok"] = hashes.ok
        return content


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
