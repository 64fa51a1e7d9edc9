# SPDX-License-Identifier: Apache-2.0
"""The module that NxDI traces into graphs for reading prompts and for generating a token at a time."""

import torch
from neuronx_distributed_inference.models.model_base import NeuronBaseModel
from torch import Tensor

from ..dspark.drafter import Drafter
from ..model import DeepseekV41Model
from ..sampling import greedy
from ..state import StateSpec
from .config import DeepseekV41InferenceConfig
from .graph_sampling import draw
from .groups import run_layout, run_parallel
from .rows import GraphCall, graph_call, last_row, prompt_read_length
from .state_manager import StateManager
from .weights import tables_as_weights

DRAFTER_STATE = "mtp."
"""The beginning of the names of the drafter's state."""


class NeuronDeepseekV41Model(NeuronBaseModel):
    """The backbone behind NxDI's inputs. One instance serves every stage: what a call does follows from its shapes."""

    def setup_attr_for_model(self, config: DeepseekV41InferenceConfig) -> None:
        """What NxDI's base class wants to know."""
        run = config.neuron_config
        self.on_device_sampling = run.on_device_sampling_config is not None
        self.tp_degree = run.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = 1
        self.max_batch_size = run.max_batch_size
        self.buckets = run.buckets

    def init_model(self, config: DeepseekV41InferenceConfig) -> None:
        """The backbone, with its drafter where drafts are made in the graph."""
        run, model = config.neuron_config, config.to_model_config()
        parallel = run_parallel(run_layout(model, run))
        kept, room = run.expert_storage
        self.backbone = DeepseekV41Model(
            model, run.numerics, run.seq_len, kept, run.kernels, parallel, room, weight_dtype=torch.bfloat16
        )
        if run.enable_fused_speculation:
            drafter = Drafter(model, self.backbone.numerics, kept, parallel, room)
            drafter.rope_plain = self.backbone.rope_plain
            self.backbone.add_drafter(drafter)
        tables_as_weights(self.backbone)

    def init_inference_optimization(self, config: DeepseekV41InferenceConfig) -> None:
        """The state of the backbone; the drafter's is the draft module's (fused.py)."""
        self.kv_mgr = StateManager([spec for spec in self.state_spec() if not spec.name.startswith(DRAFTER_STATE)])

    def state_spec(self) -> list[StateSpec]:
        """The declared state, the backbone's first, then the drafter's."""
        return self.backbone.state_spec(self.neuron_config.kv_cache_batch_size)

    @property
    def results(self) -> int:
        """Outputs of a graph before the state."""
        return 1 + self.neuron_config.output_logits

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, seq_ids: Tensor, sampling_params: Tensor,
        *unused: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """The next token [B] int32, or logits [B, 1, vocab] fp32 where the host samples, of every row, then the state.

        Inputs as ``rows.graph_call``; sampling_params [B, 3] and, in NxDI's first dummy, the random numbers [B] int32 are
        read where the graph draws tokens. With output_logits the logits come second. Graphs of all stages give as many
        outputs.
        """
        call = graph_call(input_ids, attention_mask, position_ids, seq_ids)
        read = self.read_length(call, attention_mask.shape[1])
        hidden, _, *state = self.backbone(*call[:4], self.rank, *self.kv_mgr.read(), read_len=read)
        logits = self.backbone.logits(last_row(hidden, call.length))
        tokens = self._choose(logits[:, 0], sampling_params, unused[0]) if self.on_device_sampling else logits
        return [tokens, *([logits] if self.neuron_config.output_logits else []), *state]

    def _choose(self, logits: Tensor, sampling_params: Tensor, number: Tensor) -> Tensor:
        run = self.neuron_config
        if not run.samples_in_graph:
            return greedy(logits).to(torch.int32)
        return draw(logits, sampling_params, number, run.on_device_sampling_config.global_topk).to(torch.int32)

    def store(self, state: list[Tensor]) -> None:
        """Keeps the state that ``forward`` returned behind its results, where no device does."""
        self.kv_mgr.store(state)

    def clear(self) -> None:
        """Zeroes the state."""
        self.kv_mgr.clear()

    @property
    def rank(self) -> Tensor:
        """This rank, [1] int32: an input of the graph, so that one graph serves all ranks."""
        return self.rank_util.get_rank()

    def read_length(self, call: GraphCall, bucket: int) -> int:
        """Positions whose compressed entries a call in a graph of ``bucket`` reads."""
        run = self.neuron_config
        return prompt_read_length(bucket, run.largest_context_bucket, run.seq_len) if call.is_prompt else bucket
