# SPDX-License-Identifier: Apache-2.0
"""How many bytes each tensor takes in a device's memory: the one place that knows how a device keeps what a module declares."""

import torch
from torch import Tensor

from ..checkpoint.spec import TensorSpec, group_of

DRAFTER_EXPERTS = "drafter experts"
"""The group of the drafter's routed experts; the backbone's are "experts"."""

STATE_GROUPS = {"swa": "window KV", "ckv": "compressed KV", "ikey": "index keys"}


def parameter_bytes(name: str, parameter: Tensor, stored: dict[str, TensorSpec]) -> int:
    """Bytes of the model's parameter ``name`` on a device; ``stored``: the checkpoint's tensors.

    A weight that the checkpoint has in bf16 or in fp8 with block scales is kept in bf16, which holds it exactly, also where
    the CPU's module keeps fp32. Everything else, experts and engram tables among them, is kept as the module declares it.
    """
    spec = stored.get(name)
    if parameter.dtype == torch.float32 and spec is not None and spec.dtype in ("BF16", "F8_E4M3"):
        return 2 * parameter.numel()
    return parameter.nbytes


def parameter_group(name: str) -> str:
    """The group of the model's parameter ``name`` in the tables: the checkpoint's, and the drafter's experts apart."""
    return DRAFTER_EXPERTS if name.startswith("mtp.") and ".ffn.experts." in name else group_of(name)


def state_group(name: str) -> str:
    """The group of the state tensor ``name`` in the tables."""
    return STATE_GROUPS.get(name.removeprefix("mtp.").split(".")[0], "other state")
