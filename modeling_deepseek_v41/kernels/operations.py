# SPDX-License-Identifier: Apache-2.0
"""The operations that have more than one implementation, as one object that a model holds."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Operations:
    """One implementation of each. A field's contract is the docstring of its PyTorch function, which dispatch.py names."""

    name: str
    linear: Callable
    grouped: Callable
    attend: Callable
    attend_block: Callable
    index_scores: Callable
    top_ascending: Callable
    quantise: Callable
    quantise_index: Callable
    normalise: Callable
    rotate: Callable
    mixes: Callable
    collapse: Callable
    expand: Callable
    route: Callable
    swiglu: Callable
    expert_rows: Callable
    expert_by_expert: Callable
    traced_experts: Callable
