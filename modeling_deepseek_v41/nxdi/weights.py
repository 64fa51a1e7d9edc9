# SPDX-License-Identifier: Apache-2.0
"""From a release-format checkpoint to the tensors of one rank's traced module, by name, with nothing missing or left over."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import load_config
from ..errors import CheckpointError, RequestError
from ..loading import load_model, tables
from ..model import DeepseekV41Model
from ..parallel import unconnected
from ..shard_manifest import MANIFEST, WEIGHTS, check_size, is_sharded, made_for, rank_file_name, read_manifest
from ..sharding import shard_checkpoint
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


def lay_out_blank(model: DeepseekV41Model) -> None:
    """Gives the weights of a model that is not loaded the shapes and order that its kernels read (kernels/dispatch.py).

    They are those of a rank on which every row of an expert fits fp8: all ranks share one graph and so its shapes.
    """
    for name, parameter in model.named_parameters():
        parameter.data.fill_(-1 if name.endswith("_places") else 0)
    model.numerics.ops.lay_out(model)


class RankWeights:
    """The tensors of every rank's module in a run on the checkpoint, or the rank files (sharding.py), in ``folder``."""

    def __init__(self, folder: str | Path, run: DeepseekV41NeuronConfig):
        self.folder, self.run, self.config = folder, run, load_config(folder)
        self.layout = run_layout(self.config, run)
        self._top = "target_model." if run.enable_fused_speculation else ""

    def state_dict(self, rank: int) -> dict[str, Tensor]:
        """The tensors of ``rank``, under its module's names, read strictly."""
        run = self.run
        model = load_model(
            self.folder, run.numerics_name, run.seq_len, run.expert_weight_format, run.kernels, progress=False,
            drafter=run.enable_fused_speculation, parallel=unconnected(self.layout, rank),
            expert_exception_rows=run.expert_exception_rows, weight_dtype=torch.bfloat16,
        )  # fmt: skip
        if run.kernels != "torch":
            check_places(model, rank)
        weights = {f"{self._top}backbone.{name}": tensor.detach() for name, tensor in model.named_parameters()}
        return weights | self._tables(rank)

    def write(self, out: str | Path, ranks: Iterable[int]) -> None:
        """Writes the rank files of ``ranks`` for the same modules to the folder ``out`` (sharding.py).

        Raises CheckpointError where ``out`` has files that are made for something else, RequestError for rank files.
        """
        run = self.run
        if is_sharded(self.folder):
            raise RequestError(
                f"save_sharded_checkpoint: {self.folder} holds rank files already, which load() reads as they are; leave it"
                " out, or give the checkpoint that they were made of"
            )
        shard_checkpoint(
            self.folder, out, self.layout, run.numerics_name, run.expert_weight_format, run.expert_exception_rows,
            prefix=f"{self._top}backbone.", extra=self._tables, drafter=run.enable_fused_speculation, ranks=ranks,
        )  # fmt: skip

    def check(self, out: str | Path, ranks: Iterable[int]) -> None:
        """Raises CheckpointError where ``out`` lacks the files of ``ranks`` or has them for something else, as far as names
        and sizes say."""
        weights = Path(out) / WEIGHTS
        manifest = read_manifest(weights / MANIFEST)
        facts = made_for(self.config, self.layout, self.run.numerics, self.run.expert_storage, f"{self._top}backbone.")
        manifest.check(weights / MANIFEST, facts | {"drafter": self.run.enable_fused_speculation})
        for name in map(rank_file_name, ranks):
            check_size(weights / name, manifest.files.get(name))

    def _tables(self, rank: int) -> dict[str, Tensor]:
        """What ``rank``'s module has beside the model's weights: its number, and tables."""
        made = tables(self.folder, self.config, self.run.seq_len)
        found = {f"{self._top}backbone.{name}": table for name, table in made.items()}
        if self.run.enable_fused_speculation:
            found[f"{self._top}backbone.drafter.rope_plain"] = made["rope_plain"].clone()
        return found | {f"{self._top}rank_util.rank": torch.tensor([rank], dtype=torch.int32)}


def check_places(model: nn.Module, rank: int) -> None:
    """Raises CheckpointError where a laid out ``model`` has experts whose rows do not all fit fp8."""
    for name, parameter in model.named_parameters():
        if name.endswith("_places") and parameter.numel():
            raise CheckpointError(
                f"{name.removesuffix('_places')}: {parameter.numel()} experts of rank {rank} have rows that fp8 cannot hold, so"
                " their weights have other shapes than another rank's, and one graph serves all ranks; choose kernels torch"
            )


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
