# SPDX-License-Identifier: Apache-2.0
"""``NeuronDeepseekV41ForCausalLM``: what a user of NxDI makes, compiles, loads and generates with."""

import functools
import os
from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed_inference.models.application_base import normalize_path
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import RequestError
from .config import DeepseekV41InferenceConfig, add_drafter_config
from .fused import NeuronDSparkFusedSpecModel
from .reference import ReferenceModel
from .traced import NeuronDeepseekV41Model
from .weights import RankWeights, load_strictly
from .wrapper import DeepseekV41ModelWrapper


class NeuronDeepseekV41ForCausalLM(NeuronBaseForCausalLM):
    """DeepSeek-V4.1-Flash as an NxDI application.

    On a Neuron machine: ``compile(folder)`` once, then ``load(folder)``. On a CPU: ``to_cpu()``. Then give it to NxDI's
    HuggingFaceGenerationAdapter, or call it as NxDI's serving layers do. With enable_fused_speculation the DSpark drafter
    of the same checkpoint drafts.
    """

    _model_cls = NeuronDeepseekV41Model

    def __init__(self, model_path: str, config: DeepseekV41InferenceConfig | None = None, neuron_config: Any = None):
        if config is not None and (neuron_config or config.neuron_config).enable_fused_speculation:
            add_drafter_config(config, NeuronDeepseekV41Model, model_path)
        super().__init__(model_path, config, neuron_config)
        reference = functools.partial(type(self).load_hf_model, numerics=self.neuron_config.numerics_name)
        self.load_hf_model = reference  # type: ignore[method-assign]

    @classmethod
    def get_config_cls(cls) -> type[DeepseekV41InferenceConfig]:
        """NxDI's hook."""
        return DeepseekV41InferenceConfig

    def get_model_wrapper_cls(self) -> type[DeepseekV41ModelWrapper]:
        """NxDI's hook."""
        return DeepseekV41ModelWrapper

    def enable_context_encoding(self, **model_init_kwargs: Any) -> None:
        """NxDI's hook, the first after it chose its own fused model."""
        if self.neuron_config.enable_fused_speculation:
            self._model_cls = NeuronDSparkFusedSpecModel
        super().enable_context_encoding(**model_init_kwargs)

    @staticmethod
    def load_hf_model(model_path: str, numerics: str = "release") -> ReferenceModel:
        """The model on plain CPU, which accuracy checks compare with. On an instance, in the instance's own arithmetic."""
        return ReferenceModel.from_pretrained(model_path, numerics=numerics)

    @functools.cached_property
    def weights(self) -> RankWeights:
        """Every rank's tensors, read from ``model_path``: a checkpoint, or rank files that ``deepseek-v41 shard`` made."""
        return RankWeights(self.model_path, self.neuron_config)

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, Tensor]:
        """NxDI's hook: the tensors of the first local rank. Weights are read rank by rank (``shard_weights``)."""
        return self.weights.state_dict(self.neuron_config.start_rank_id)

    def shard_weights(self, compiled_model_path: str, debug: bool = False, pre_shard_weights_hook: Any = None) -> None:
        """Writes weights/tp{rank}_sharded_checkpoint.safetensors of every local rank, with a manifest (sharding.py).

        What was broken off goes on; files that are whole are kept. Raises CheckpointError where the folder has files that
        are made for something else.
        """
        if pre_shard_weights_hook:
            pre_shard_weights_hook(self)
        if not self.neuron_config.skip_sharding and self.neuron_config.save_sharded_checkpoint:
            self.weights.write(normalize_path(compiled_model_path), self._local_ranks())

    def load_weights(
        self, compiled_model_path: str, start_rank_id: int | None = None, local_ranks_size: int | None = None
    ) -> None:
        """Loads every local rank's tensors to the device: the sharded files, or without them from ``model_path`` itself.

        Raises CheckpointError where files are missing, cut off or made for something else.
        """
        ranks = self._local_ranks(start_rank_id, local_ranks_size)
        if self.neuron_config.save_sharded_checkpoint:
            self.weights.check(normalize_path(compiled_model_path), ranks)
            super().load_weights(compiled_model_path, start_rank_id, local_ranks_size)
            return
        tensors = [self.weights.state_dict(rank) for rank in ranks]
        self.traced_model.nxd_model.initialize(tensors, torch.tensor([ranks.start], dtype=torch.int32))

    def to_cpu(self) -> None:
        """Makes the module of this process's rank on the CPU, for every stage the same, and loads its weights strictly.

        One process alone, or every process of a torchrun of world_size. NXD_CPU_MODE stays set: one process, one mode.
        Raises RequestError for kernels of a device.
        """
        if self.neuron_config.kernels != "torch":
            raise RequestError(f"kernels: {self.neuron_config.kernels} needs a Neuron device; on a CPU choose torch")
        os.environ["NXD_CPU_MODE"] = "1"
        run = self.neuron_config
        _join_processes(run.world_size)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.tp_degree, skip_collective_init=True)
        module = self.models[0].model_cls(self.models[0].config)
        load_strictly(module, self.weights.state_dict(torch.distributed.get_rank()))
        for wrapper in self.models:
            wrapper.model = module
        self.eval()

    def reset_kv_cache(self) -> None:
        """Zeroes the state where it is on the CPU. Nothing needs it: a new sequence begins at position 0."""
        wrapper = self.context_encoding_model
        if wrapper.model is not None and not wrapper.is_neuron():
            wrapper.model.clear()

    def _copy_past_key_values(self, outputs: list[Tensor]) -> None:
        """NxDI's hook: nothing to do, the wrapper keeps the state."""

    def _get_constructed_outputs(self, outputs: list[Tensor], is_run_on_neuron: bool) -> CausalLMOutputWithPast:
        """NxDI's hook: the wrapper's results as what generate() and the serving layers read."""
        if self.neuron_config.enable_fused_speculation:
            return self._construct_output(outputs)
        if self.on_device_sampling and self.neuron_config.output_logits:
            return self._construct_output_with_tokens_and_logits(*outputs)
        return self._construct_output(outputs[0])

    def _local_ranks(self, first: int | None = None, count: int | None = None) -> range:
        first = self.neuron_config.start_rank_id if first is None else first
        return range(first, first + (count or self.neuron_config.local_ranks_size))


def _join_processes(world_size: int) -> None:
    """Initialises torch.distributed over gloo; raises RequestError where the processes do not fit ``world_size``."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise RequestError(
            f"world_size: {started} process(es) were started, expected {world_size} (tp_degree):"
            f" torchrun --nproc_per_node {world_size}"
        )
    if torch.distributed.is_initialized():
        return
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    else:
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
