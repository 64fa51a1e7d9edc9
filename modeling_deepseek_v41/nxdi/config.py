# SPDX-License-Identifier: Apache-2.0
"""NxDI's two configurations for this model: how it runs, and what it is (flat, as NxDI's wrappers read it)."""

import copy
import dataclasses
from typing import Any

import torch
from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig, InferenceConfig, MoENeuronConfig

from ..config import ModelConfig, config_from_dict
from ..dspark.drafter import check_num_draft_tokens
from ..errors import RequestError
from ..expert_bank import ExpertStorage
from ..numerics import Numerics, numerics_by_name
from .refusals import refusal, refused

NUMERICS = {torch.float32: "fp32", torch.bfloat16: "release"}
"""The arithmetic that a torch_dtype asks for."""


KERNELS = ("torch", "nki")
"""What runs inside a graph."""
MOST_CANDIDATES = 16384
"""Of a top-k on a device (aws-neuron-sdk issue 1339)."""


class DeepseekV41NeuronConfig(MoENeuronConfig):
    """NxDI's options for this model; RequestError lists every option that it cannot serve.

    Its own: which rank holds what (layout.py): attn_tp_degree, dspark_moe_ep_degree and o_proj_reduce; how routed experts
    are kept (expert_bank.py): expert_weight_format, by default fp8_exact, and expert_exception_rows; kernels, torch or nki:
    whether PyTorch's operations are compiled or this package's kernels take their place, which needs bfloat16 and fp8_exact
    and was not verified on a device.
    """

    def __init__(self, **kwargs: Any):
        kwargs["cast_type"] = "as-declared"
        self.attn_tp_degree: int | None = kwargs.pop("attn_tp_degree", None)
        self.dspark_moe_ep_degree: int | None = kwargs.pop("dspark_moe_ep_degree", None)
        self.o_proj_reduce: str = kwargs.pop("o_proj_reduce", "group")
        self.expert_weight_format: str = kwargs.pop("expert_weight_format", "fp8_exact")
        self.expert_exception_rows: int | None = kwargs.pop("expert_exception_rows", None)
        self.kernels: str = kwargs.pop("kernels", "torch")
        super().__init__(**kwargs)
        self.expert_storage.check()
        standard = MoENeuronConfig()
        lines = refused(self, lambda name: getattr(standard, name))
        lines += [message for wrong, message in self._conflicts() if wrong]
        if lines:
            raise RequestError(refusal(lines))

    @property
    def samples_in_graph(self) -> bool:
        """Whether a graph draws tokens (graph_sampling.py); else on-device sampling is greedy."""
        chosen = self.on_device_sampling_config
        return chosen is not None and bool(chosen.do_sample or chosen.dynamic)

    @property
    def expert_storage(self) -> ExpertStorage:
        """How routed experts are kept."""
        return ExpertStorage(self.expert_weight_format, self.expert_exception_rows)

    @property
    def numerics(self) -> Numerics:
        """The arithmetic that torch_dtype asks for: float32 or, in bfloat16, the release's."""
        return numerics_by_name(self.numerics_name)

    @property
    def numerics_name(self) -> str:
        """Its name: fp32 or release."""
        return NUMERICS[self.torch_dtype]

    @property
    def largest_context_bucket(self) -> int:
        """Tokens of the largest graph that reads prompts; longer prompts run in chunks of this size."""
        chosen = self.context_encoding_buckets if self.enable_bucketing else None
        return chosen[-1] if chosen else self.max_context_length

    def _conflicts(self) -> list[tuple[bool, str]]:
        fused, length = self.enable_fused_speculation, self.speculation_length
        by_id, by_columns = self.moe_ep_degree, self.moe_tp_degree
        return [
            (
                by_id * by_columns not in (1, self.tp_degree),
                f"moe_ep_degree, moe_tp_degree: found {by_id} x {by_columns}, expected a product of tp_degree {self.tp_degree},"
                " or 1 x 1, which is the default split",
            ),
            (
                self.world_size != self.tp_degree,
                f"world_size: found {self.world_size}, expected tp_degree {self.tp_degree}: one model over all ranks",
            ),
            (self.torch_dtype not in NUMERICS, f"torch_dtype: found {self.torch_dtype}, expected float32 or bfloat16"),
            (self.kernels not in KERNELS, f"kernels: found {self.kernels!r}, expected one of {', '.join(KERNELS)}"),
            (
                self.kernels == "nki" and (self.expert_weight_format, self.torch_dtype) != ("fp8_exact", torch.bfloat16),
                f"kernels: nki reads fp8_exact experts and computes in bfloat16, found {self.expert_weight_format} and"
                f" {self.torch_dtype}; choose torch",
            ),
            (
                self.max_length > self.seq_len,
                f"max_length: found {self.max_length}, expected at most seq_len {self.seq_len}: state is allocated for seq_len",
            ),
            (
                self.kv_cache_batch_size < max(self.ctx_batch_size, self.tkg_batch_size),
                f"kv_cache_batch_size: found {self.kv_cache_batch_size}, expected at least ctx_batch_size"
                f" {self.ctx_batch_size} and tkg_batch_size {self.tkg_batch_size}",
            ),
            (
                length > 0 and not fused,
                f"speculation_length: found {length} without enable_fused_speculation; {length} tokens are verified only there",
            ),
            (fused and length < 2, f"speculation_length: found {length} with enable_fused_speculation, expected 2 or more"),
            (
                fused and self.on_device_sampling_config is None,
                "enable_fused_speculation: needs on_device_sampling_config (--on-device-sampling): drafts are chosen and"
                " accepted in the graph",
            ),
            (
                fused and self.samples_in_graph,
                "enable_fused_speculation: accepts greedily in the graph; leave out do_sample and dynamic of"
                " on_device_sampling_config, or the speculation",
            ),
            (
                self.samples_in_graph and not 1 <= self.on_device_sampling_config.global_topk <= MOST_CANDIDATES,
                f"global_topk: expected 1 to {MOST_CANDIDATES} tokens to draw from, which a top-k in a graph can give",
            ),
        ]


class DeepseekV41InferenceConfig(InferenceConfig):
    """The keys of the release's config.json, flat, beside ``neuron_config``."""

    def add_derived_config(self) -> None:
        """What NxDI's base classes read and the checkpoint does not say."""
        self.num_cores_per_group = 1

    def validate_config(self) -> None:
        """Raises ConfigError or RequestError for a model or a run that has no consistent reading."""
        super().validate_config()
        config, run = self.to_model_config(), self.neuron_config
        if run.seq_len > config.max_position_embeddings:
            raise RequestError(
                f"seq_len: found {run.seq_len}, expected at most max_position_embeddings {config.max_position_embeddings} of"
                f" {config.source}"
            )
        if run.enable_fused_speculation:
            if not config.num_nextn_predict_layers:
                raise RequestError(
                    f"enable_fused_speculation: {config.source} has num_nextn_predict_layers 0, so there is no drafter"
                )
            check_num_draft_tokens(run.speculation_length - 1, config)

    def to_model_config(self) -> ModelConfig:
        """The validated configuration that the model is built from."""
        names = {field.name for field in dataclasses.fields(ModelConfig)} - {"source", "has_vision", "unknown_keys"}
        keys = {name: getattr(self, name) for name in names | {"vision_config"} if hasattr(self, name)}
        return config_from_dict(keys, source=getattr(self, "_name_or_path", "") or "config")

    @classmethod
    def get_neuron_config_cls(cls) -> type[DeepseekV41NeuronConfig]:
        """NxDI's hook."""
        return DeepseekV41NeuronConfig


def add_drafter_config(config: DeepseekV41InferenceConfig, worker_cls: type, model_path: str) -> None:
    """Gives ``config`` the fused_spec_config that NxDI's fused speculation asks for: the drafter is in the same checkpoint."""
    draft = copy.deepcopy(config)
    draft.fused_spec_config = None
    draft.neuron_config.enable_fused_speculation = False
    draft.neuron_config.speculation_length = 0
    draft.neuron_config.kv_cache_tiling = False
    config.fused_spec_config = FusedSpecNeuronConfig(worker_cls, draft_config=draft, draft_model_path=model_path)
