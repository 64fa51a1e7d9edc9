# SPDX-License-Identifier: Apache-2.0
"""The operations that have more than one implementation, as one object that a model holds."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Operations:
    """One implementation of each. A field's contract is the docstring of its PyTorch function, which dispatch.py names.

    index_rows: how many rows of decode share a call of index_scores and of top_ascending without a change of their bits.
    """

    name: str
    index_rows: int
    lay_out: Callable
    linear: Callable
    grouped: Callable
    query_projection: Callable
    output_projection: Callable
    quantised_linears: Callable
    attend: Callable
    attend_block: Callable
    index_scores: Callable
    top_ascending: Callable
    candidate_blocks: Callable
    quantise: Callable
    quantise_index: Callable
    quantise_compressed: Callable
    normalise: Callable
    rotate: Callable
    rotate_and_quantise: Callable
    sublayer_input: Callable
    mixes: Callable
    collapse: Callable
    weighted_sum: Callable
    expand: Callable
    compress_pool: Callable
    engram_gate: Callable
    route: Callable
    route_and_share: Callable
    swiglu: Callable
    shared_expert: Callable
    expert_rows: Callable
    expert_by_expert: Callable
    every_expert: Callable
