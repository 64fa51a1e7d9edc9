# SPDX-License-Identifier: Apache-2.0
"""What the graphs of a stage have done since they were loaded. NxDI's report has neither steps nor acceptance."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Counts:
    """calls: of the graph. rows: sequences in them, inactive rows not counted. tokens: new tokens that these were given.
    seconds: that the calls took, warm-up included."""

    calls: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counts and what follows from them, for JSON: None where nothing ran."""
        per_row = self.tokens / self.rows if self.rows else None
        rate = self.tokens / self.seconds if self.seconds else None
        return dataclasses.asdict(self) | {"tokens_per_row": per_row, "tokens_per_second": rate}
