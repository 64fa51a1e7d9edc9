# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is made of, as rows of a table."""

import dataclasses

from .reader import Checkpoint
from .spec import GROUPS, is_vision


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """One group of tensors: how many, their bytes, their stored types, and whether a text run uses them."""

    group: str
    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]
    used: bool


def summarize(checkpoint: Checkpoint) -> list[GroupRow]:
    """One row per group that occurs in ``checkpoint``, in the order of GROUPS; the bytes add up to ``total_bytes``."""
    rows = []
    for group in GROUPS:
        members = {name: spec for name, spec in checkpoint.tensors.items() if spec.group == group}
        if members:
            rows.append(
                GroupRow(
                    group=group,
                    tensors=len(members),
                    nbytes=sum(spec.nbytes for spec in members.values()),
                    dtypes=tuple(sorted({spec.dtype for spec in members.values()})),
                    used=not all(is_vision(name) for name in members),
                )
            )
    return rows
