# SPDX-License-Identifier: Apache-2.0
"""The groups that a rank's tensors are counted in."""

from ..checkpoint.spec import group_of

DRAFTER_EXPERTS = "drafter experts"
"""The group of the drafter's routed experts; the backbone's are "experts"."""

STATE_GROUPS = {"swa": "window KV", "ckv": "compressed KV", "ikey": "index keys"}


def parameter_group(name: str) -> str:
    """The group of the model's parameter ``name`` in the tables: the checkpoint's, and the drafter's experts apart."""
    return DRAFTER_EXPERTS if name.startswith("mtp.") and ".ffn.experts." in name else group_of(name)


def state_group(name: str) -> str:
    """The group of the state tensor ``name`` in the tables."""
    return STATE_GROUPS.get(name.removeprefix("mtp.").split(".")[0], "other state")
