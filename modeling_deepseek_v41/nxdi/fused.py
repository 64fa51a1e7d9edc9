# SPDX-License-Identifier: Apache-2.0
"""DSpark inside NxDI's fused speculation: one graph drafts, verifies, accepts and shows the drafter what was verified."""

from typing import cast

import torch
from neuronx_distributed_inference.models.model_base import NeuronFusedSpecModel
from torch import Tensor, nn

from ..dspark.drafter import Drafter
from ..dspark.step import read_prompt, speculative_step
from ..sampling import greedy
from .config import DeepseekV41InferenceConfig
from .rows import GraphCall, graph_call, last_row
from .state_manager import StateManager
from .traced import DRAFTER_STATE, NeuronDeepseekV41Model


class DrafterState(nn.Module):
    """The drafter's state as NxDI's ``draft_model``. Its weights belong to the backbone's module, which calls it."""

    def __init__(self, target: NeuronDeepseekV41Model):
        super().__init__()
        self.n_positions = target.n_positions
        self.kv_mgr = StateManager([spec for spec in target.state_spec() if spec.name.startswith(DRAFTER_STATE)])


class NeuronDSparkFusedSpecModel(NeuronFusedSpecModel):
    """Reads prompts into backbone and drafter; a step verifies ``speculation_length`` rows: the newest token and the drafts.

    NxDI's parent builds two models of its own kinds; only its place in the class tree is used here.
    """

    def __init__(self, config: DeepseekV41InferenceConfig):
        nn.Module.__init__(self)
        self.config, self.neuron_config = config, config.neuron_config
        self.n_positions = config.neuron_config.n_positions
        self.target_model = NeuronDeepseekV41Model(config)
        self.draft_model = DrafterState(self.target_model)

    @property
    def results(self) -> int:
        """Outputs of a graph before the state."""
        return 6 if self.neuron_config.output_logits else 4

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, seq_ids: Tensor, sampling_params: Tensor,
        *unused: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """One graph call of B rows: the new tokens, what the next call begins with, then the drafter's and backbone's state.

        Inputs as ``rows.graph_call``. Returns tokens int32 [B, speculation_length], -1 behind the last one; the newest token
        [B, 1], the mask of the positions before it [B, bucket] and its position [B, 1], all int32; with output_logits also
        the drafter's and the backbone's logits. A prompt gives one token and no drafts, whose logits are zeros then.
        """
        call = graph_call(input_ids, attention_mask, position_ids, seq_ids)
        state = [*self.target_model.kv_mgr.read(), *self.draft_model.kv_mgr.read()]
        run = self._read if call.is_prompt else self._speculate
        results, state = run(call, attention_mask.shape[1], state)
        backbone = len(self.target_model.kv_mgr.past_key_values)
        return [*results, *state[backbone:], *state[:backbone]]

    def store(self, state: list[Tensor]) -> None:
        """Keeps the state that ``forward`` returned behind its results, where no device does."""
        drafter = len(self.draft_model.kv_mgr.past_key_values)
        self.draft_model.kv_mgr.store(state[:drafter])
        self.target_model.kv_mgr.store(state[drafter:])

    def clear(self) -> None:
        """Zeroes the state."""
        self.draft_model.kv_mgr.clear()
        self.target_model.kv_mgr.clear()

    @property
    def _drafter(self) -> Drafter:
        return cast(Drafter, self.target_model.backbone.drafter)

    def _read(self, call: GraphCall, bucket: int, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        target, model = self.target_model, self.target_model.backbone
        read = target.read_length(call, bucket)
        hidden, *state = read_prompt(model, self._drafter, *call[:4], target.rank, *state, read_len=read)
        logits = model.logits(last_row(hidden, call.length))
        token = greedy(logits[:, 0]).unsqueeze(1)
        tokens = nn.functional.pad(token, (0, self.neuron_config.speculation_length - 1), value=-1)
        logits_out = [torch.zeros_like(logits), logits]
        return self._results(tokens, token, call.start + call.length, self.neuron_config.seq_len, logits_out), state

    def _speculate(self, call: GraphCall, bucket: int, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        target, model, rows = self.target_model, self.target_model.backbone, self.neuron_config.speculation_length
        length = torch.where(call.slot >= 0, (bucket - call.start).clamp(1, rows), 0)
        step, state = speculative_step(
            model, self._drafter, call.ids[:, 0], call.start, length, call.slot, target.rank, state,
            num_draft_tokens=rows - 1, read_len=bucket,
        )  # fmt: skip
        logits = [step.drafts.logits, step.logits]
        return self._results(step.tokens, step.next_token.unsqueeze(1), step.next_start, bucket, logits), state

    def _results(self, tokens: Tensor, newest: Tensor, position: Tensor, width: int, logits: list[Tensor]) -> list[Tensor]:
        mask = torch.arange(width, device=position.device) < position.unsqueeze(1)
        results = [value.to(torch.int32) for value in (tokens, newest, mask, position.unsqueeze(1))]
        return results + (logits if self.neuron_config.output_logits else [])
