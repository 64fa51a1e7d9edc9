# SPDX-License-Identifier: Apache-2.0
"""One stage of the drafter: the backbone's block with attention over its own window of main_x (docs/model.md, section 9)."""

from torch import Tensor, nn

from ..attention import Attention, Rotary, Selection
from ..config import ModelConfig
from ..expert_bank import ExpertStorage
from ..linear import Embedding, Linear, RMSNorm
from ..model import Block
from ..numerics import Arithmetic
from ..parallel import ColumnParallelLinear, Group, Parallel
from ..state import Call, State


class StageAttention(Attention):
    """Attention of a draft block over the stage's window of main_x and, not causally, over the block itself."""

    def __init__(self, config: ModelConfig, layer: int, arithmetic: Arithmetic, parallel: Parallel):
        super().__init__(config, layer, arithmetic, parallel)
        self.ring = f"mtp.swa.{layer - config.num_hidden_layers}"

    def forward(self, x: Tensor, rotary: Rotary, call: Call, state: State, selection: Selection) -> tuple[Tensor, Selection]:
        """x [B, block, d] to the sublayer's output [B, block, d]; the block's own KV is not kept."""
        table = rotary.plain_rows
        q, kv, *_ = self.inputs(x, table)
        o = self.numerics.ops.attend_block(q, kv, self.ring, table, self.attn_sink, self.window, state, self.numerics)
        return self.output(o, call.rank), selection


class MarkovHead(nn.Module):
    """What the token before says about the next one: a low-rank table of logits, fp32."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, world: Group):
        super().__init__()
        rank, vocab = config.dspark_markov_rank, config.vocab_size
        self.embed = Embedding(vocab, rank)
        self.head = ColumnParallelLinear(rank, vocab, arithmetic, world, rounds=False, gathers=True)


class ConfidenceHead(nn.Module):
    """How sure the drafter is of a draft, as a raw number; its sigmoid is a share."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic):
        super().__init__()
        self.proj = Linear(config.hidden_size + config.dspark_markov_rank, 1, arithmetic, rounds=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d + rank] to [B, T, 1] fp32."""
        return self.proj(x)


class Stage(Block):
    """mtp.{index}: the first stage owns the projection of the taps, the last one the heads."""

    def __init__(self, config: ModelConfig, index: int, arithmetic: Arithmetic, storage: ExpertStorage, parallel: Parallel):
        super().__init__(config, config.num_hidden_layers + index, arithmetic, storage, parallel, StageAttention)
        d, eps, world = config.hidden_size, config.rms_norm_eps, parallel.world
        if index == 0:
            taps = len(config.dspark_target_layer_ids) * d
            self.main_proj = ColumnParallelLinear(taps, d, arithmetic, world, gathers=True)
            self.main_norm = RMSNorm(d, eps, arithmetic)
        if index == config.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(d, eps, arithmetic)
            self.markov_head = MarkovHead(config, arithmetic, world)
            self.confidence_head = ConfidenceHead(config, arithmetic)
