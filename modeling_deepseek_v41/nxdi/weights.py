# SPDX-License-Identifier: Apache-2.0
"""From a release-format checkpoint to the tensors of one rank's traced module, by name, with nothing missing or left over."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import load_config
from ..errors import CheckpointError
from ..loading import load_model
from ..parallel import unconnected
from .config import DeepseekV41NeuronConfig
from .groups import run_layout

TABLES = ("rope_plain", "rope_compressed", "token_map")
"""What the backbone keeps beside its weights; in a graph they are weights too, not constants."""


def tables_as_weights(module: nn.Module) -> None:
    """Makes the tables of ``module`` and its parts parameters of their own, so that they are loaded with the weights."""
    for part in module.modules():
        for name in TABLES:
            table = part._buffers.pop(name, None)
            if table is not None:
                part.register_parameter(name, nn.Parameter(table.clone(), requires_grad=False))


def rank_state_dict(folder: str | Path, run: DeepseekV41NeuronConfig, rank: int) -> dict[str, Tensor]:
    """The tensors of ``rank``'s module, under its names, read strictly from ``folder``."""
    fused = run.enable_fused_speculation
    parallel = unconnected(run_layout(load_config(folder), run), rank)
    model = load_model(
        folder, run.numerics_name, run.seq_len, kernels="torch", progress=False, drafter=fused, parallel=parallel
    )
    prefix = "target_model." if fused else ""
    tables_as_weights(model)
    state = {f"{prefix}backbone.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    state[f"{prefix}rank_util.rank"] = torch.tensor([rank], dtype=torch.int32)
    return state


def load_strictly(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts ``state`` in the place of ``module``'s parameters, which must have the same names, shapes and dtypes.

    State between calls (past_key_values) stays as it is. Raises CheckpointError naming what does not fit.
    """
    own = {name: parameter for name, parameter in module.named_parameters() if ".past_key_values." not in f".{name}"}
    check_names(own, state)
    for name, parameter in own.items():
        tensor = state[name]
        if (tensor.shape, tensor.dtype) != (parameter.shape, parameter.dtype):
            raise CheckpointError(
                f"{name}: found {tensor.dtype} {list(tensor.shape)}, expected {parameter.dtype} {list(parameter.shape)};"
                " make the sharded weights again with the configuration that is used now"
            )
        parameter.data = tensor


def check_names(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises CheckpointError where the names differ: NxDI itself skips a missing one in silence."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"sharded weights: {len(missing)} missing ({', '.join(missing[:5])}), {len(unknown)} unknown"
            f" ({', '.join(unknown[:5])}); make them again with the configuration that is used now"
        )
