# SPDX-License-Identifier: Apache-2.0
"""The stack: embedding, residual streams, engram, blocks, head (docs/model.md, sections 2, 3, 8 and 9)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .attention import Attention, Rotary, Selection
from .config import ModelConfig
from .engram.hashing import engram_layouts, lookback
from .engram.layer import Engram
from .expert_bank import ExpertStorage
from .hyper_connections import HyperConnection
from .kernels.dispatch import operations
from .linear import RMSNorm
from .moe import MoE
from .numerics import Arithmetic, Numerics
from .parallel import SINGLE, ColumnParallelLinear, Parallel, ParallelEmbedding
from .rope import rope_table
from .state import Call, State, StateSpec, make_call, state_spec, windows

if TYPE_CHECKING:
    from .dspark.drafter import Drafter

DRAFTER = "drafter."
"""Before the names of the drafter's parameters in a model that has one; the checkpoint has no such prefix."""


class Block(nn.Module):
    """One layer: an attention and an expert sublayer, each between a collapse and an expansion of the streams."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        arithmetic: Arithmetic,
        storage: ExpertStorage,
        parallel: Parallel,
        attention: type[Attention] = Attention,
    ):
        super().__init__()
        self.arithmetic = arithmetic
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, arithmetic)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, arithmetic)
        self.hc_attn = HyperConnection(config, arithmetic)
        self.hc_ffn = HyperConnection(config, arithmetic)
        self.attn = attention(config, layer, arithmetic, parallel)
        self.engram: Engram | None = None
        self.ffn = MoE(config, arithmetic, layer >= config.num_hidden_layers, storage, parallel)

    def forward(
        self, x: Tensor, pre_mix: Tensor, rotary: Rotary, call: Call, state: State, selection: Selection
    ) -> tuple[Tensor, Tensor, Selection]:
        """Streams x [B, T, hc, d] fp32 and the previous sublayer's pre [B, T, hc] to the new streams, pre and selection.

        The pre coefficients are delayed by one sublayer: attention collapses with the previous layer's, the experts with
        those made before this layer's attention; post and comb are the sublayer's own.
        """
        ops = self.arithmetic.ops
        h, attn_pre, post, comb = self.hc_attn(x, pre_mix, self.attn_norm.weight)
        y, selection = self.attn(h, rotary, call, state, selection)
        x = ops.expand(y, x, post, comb, self.arithmetic)
        h, ffn_pre, post, comb = self.hc_ffn(x, attn_pre, self.ffn_norm.weight)
        return ops.expand(self.ffn(h, call.rank), x, post, comb, self.arithmetic), ffn_pre, selection


class DeepseekV41Model(nn.Module):
    """The text backbone. Parameters are uninitialised until ``loading.load_model`` fills them.

    ``expert_weight_format`` and ``expert_exception_rows``: how routed experts are kept (expert_bank.py). ``kernels``: auto,
    torch, numba or nki (kernels/dispatch.py). Calls of at most ``exact_tokens`` tokens per sequence, by default
    dspark_block_size + 1, which decode and verification have, keep rows apart to the bit (rows.py). ``parallel``: the ranks
    that compute it together, each with its own parts (layout.py); all of them make the same calls. ``weight_dtype``: what
    linears and routers are kept in; bf16 is half the memory and exact, and what a device's products take; a CPU's take fp32.
    """

    rope_plain: Tensor
    rope_compressed: Tensor
    token_map: Tensor

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        max_seq_len: int,
        expert_weight_format: str = "bf16",
        kernels: str = "torch",
        parallel: Parallel = SINGLE,
        expert_exception_rows: int | None = None,
        exact_tokens: int | None = None,
        weight_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        arithmetic = Arithmetic(
            numerics.dtype,
            numerics.quantize_activations,
            numerics.quantize_cache,
            ops=operations(kernels),
            exact_tokens=config.dspark_block_size + 1 if exact_tokens is None else exact_tokens,
            weight_dtype=weight_dtype,
        )
        self.config, self.numerics, self.max_seq_len, self.parallel = config, arithmetic, max_seq_len, parallel
        world = parallel.world
        self.embed = ParallelEmbedding(config.vocab_size, config.hidden_size, world)
        storage = ExpertStorage(expert_weight_format, expert_exception_rows)
        blocks = [Block(config, layer, arithmetic, storage, parallel) for layer in range(config.num_hidden_layers)]
        for layout in engram_layouts(config):
            blocks[layout.layer].engram = Engram(config, layout, arithmetic, world)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, arithmetic)
        self.head = ColumnParallelLinear(config.hidden_size, config.vocab_size, arithmetic, world, rounds=False, gathers=True)
        self.register_buffer("rope_plain", rope_table(config, False, max_seq_len), persistent=False)
        self.register_buffer("rope_compressed", rope_table(config, True, max_seq_len), persistent=False)
        self.register_buffer("token_map", torch.zeros(config.vocab_size, dtype=torch.int32), persistent=False)
        self.drafter: Drafter | None = None
        self.state_names = [spec.name for spec in self.state_spec(1)]

    def add_drafter(self, drafter: "Drafter") -> None:
        """Makes ``drafter`` this model's: its state joins the declared list. State allocated before does not fit any more."""
        self.drafter = drafter
        self.state_names = [spec.name for spec in self.state_spec(1)]

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def state_spec(self, slots: int) -> list[StateSpec]:
        """The declared state for ``slots`` sequences of at most ``max_seq_len`` positions, the drafter's where there is one."""
        return state_spec(self.config, self.numerics.dtype, slots, self.max_seq_len, self.drafter is not None)

    def forward(
        self, ids: Tensor, start: Tensor, length: Tensor, slot: Tensor, rank: Tensor, *state: Tensor, read_len: int
    ) -> tuple[Tensor, ...]:
        """One call of T tokens for each of B sequences.

        ids [B, T] int64; start, length, slot [B]: position of the first token, real tokens (the rest is padding), state
        slot (-1: inactive row); rank [1] int: this process's, 0 where there is one; ``state`` in the order of
        ``state_spec``; ``read_len``: positions whose compressed entries may be read, at least max(start + length).
        Returns (hidden [B, T, d] after the final norm, taps [B, T, targets * d], *state). State is updated in place.
        """
        call = make_call(start, length, slot, ids.shape[1], read_len, rank)
        store = State(self.state_names, state, call)
        plain, compressed = self.rope_plain, self.rope_compressed
        known = call.positions.clamp_max(plain.shape[0] - 1)
        rotary = Rotary(plain, compressed, plain[known], compressed[known])
        embedded, kv_of = self._look_up(ids, call, store)
        x = embedded.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        pre_mix = torch.zeros(x.shape[:3], device=x.device)
        pre_mix[..., 0] = 1.0
        selection, taps = Selection(), []
        for index, layer in enumerate(self.blocks):
            if layer.engram is not None:
                x = layer.engram(x, kv_of[index])
            if index in self.config.dspark_target_layer_ids:
                taps.append(self.numerics.round(x.mean(2)))
            x, pre_mix, selection = layer(x, pre_mix, rotary, call, store, selection)
        hidden = self.numerics.ops.collapse(x, pre_mix, self.norm.weight, self.norm.eps, self.numerics)
        return hidden, torch.cat(taps, -1) if taps else hidden[..., :0], *state

    def logits(self, hidden: Tensor) -> Tensor:
        """The head in fp32: hidden [B, T, d] after the final norm to logits [B, T, vocab] fp32."""
        return self.head(hidden)

    def _look_up(self, ids: Tensor, call: Call, state: State) -> tuple[Tensor, dict[int, Tensor]]:
        """What follows from token ids alone: the embedding [B, T, d] and every engram layer's keys and value [B, T, hc + 1, d].

        The ranks' rows of all tables are added up in one exchange, their columns of keys and values gathered in another.
        """
        part = self.embed.part(ids, call.rank)
        engrams = {index: layer.engram for index, layer in enumerate(self.blocks) if layer.engram is not None}
        if not engrams:
            return self.parallel.world.sum(part), {}
        grams = self._grams(ids, call, state)
        embedded, *rows = self.parallel.world.sums(part, *(engram.look_up(grams, call.rank) for engram in engrams.values()))
        weights = [engram.wkv.weight for engram in engrams.values()]
        columns = self.numerics.ops.quantised_linears(rows, weights, self.numerics)
        hc, d = self.config.hc_mult, self.config.hidden_size
        kv = (whole[..., : (hc + 1) * d].unflatten(-1, (hc + 1, d)) for whole in self.parallel.world.gathers(*columns))
        return embedded, dict(zip(engrams, kv, strict=True))

    def _grams(self, ids: Tensor, call: Call, state: State) -> Tensor:
        """The n newest compressed ids at every position, [B, T, n], and the look-back state moved on."""
        n = self.config.engram_max_ngram_size
        compressed = self.token_map[ids]
        stretch = windows(state.history("tok", n - 1), compressed)
        state.write_ring("tok", compressed)
        alive = call.start[:, None] + torch.arange(1 - n, ids.shape[1], device=ids.device) >= 0
        pad = self.token_map[self.config.engram_pad_token_id]
        return lookback(stretch, alive, n, pad)
