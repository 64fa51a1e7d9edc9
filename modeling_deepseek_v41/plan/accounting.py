# SPDX-License-Identifier: Apache-2.0
"""Is every tensor of the checkpoint somewhere, all of it, and no part of it more often than another?"""

import re
from collections import Counter
from typing import NamedTuple

from ..checkpoint.spec import expected_tensors, is_vision
from ..config import ModelConfig
from ..layout import Layout
from ..shard_plan import ShardPlan

_LAYER = re.compile(r"^(layers|mtp)\.\d+\.")


class Accounting(NamedTuple):
    """Tensors and bytes as a checkpoint stores them."""

    tensors: int
    nbytes: int
    whole: int
    """Tensors whose parts, over all ranks, are there, each on as many ranks as the others."""
    unread: int
    """Tensors among them that only image input uses: they are on no rank."""
    split: int
    """Tensors that are cut into parts or belong to some ranks only; all others are on every rank."""


def account(config: ModelConfig, layout: Layout) -> Accounting:
    """What the ranks of ``layout`` hold of the text model with its drafter."""
    plans = [ShardPlan(config, layout, rank) for rank in range(layout.world_size)]
    stored = expected_tensors(config)
    found: dict[str, tuple[bool, bool]] = {}
    whole = split = unread = 0
    for name in stored:
        if is_vision(name):
            unread += 1
            continue
        kind = _LAYER.sub(r"\1.0.", name)
        if kind not in found:
            found[kind] = _held(name, plans)
        whole += found[kind][0]
        split += found[kind][1]
    return Accounting(len(stored), sum(spec.nbytes for spec in stored.values()), whole, unread, split)


def _held(name: str, plans: list[ShardPlan]) -> tuple[bool, bool]:
    """Whether the parts of ``name`` make it whole, evenly; and whether it is divided at all."""
    holders = [plan for plan in plans if plan.holds(name)]
    parts = [plan.part(name) for plan in holders]
    places = Counter((part.dim, part.parts, part.place) if part else (0, 1, 0) for part in parts)
    cuts = {(dim, count) for dim, count, _ in places}
    even = len(cuts) == 1 and len(set(places.values())) == 1
    whole = even and sorted(place for _, _, place in places) == list(range(next(iter(cuts))[1]))
    return whole, len(holders) < len(plans) or len(places) > 1
