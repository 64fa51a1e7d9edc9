# SPDX-License-Identifier: Apache-2.0
"""The stack: embedding, residual streams, engram, blocks, head (docs/model.md, sections 2, 3, 8 and 9)."""

import torch
from torch import Tensor, nn

from .attention import Attention, Rotary, Selection
from .config import ModelConfig
from .engram.hashing import engram_layouts, lookback
from .engram.layer import Engram
from .hyper_connections import HyperConnection, collapse, expand
from .linear import Embedding, Linear, RMSNorm
from .moe import MoE
from .numerics import Numerics
from .rope import rope_table
from .state import Call, State, StateSpec, make_call, state_spec, windows


class Block(nn.Module):
    """One layer: an attention and an expert sublayer, each between a collapse and an expansion of the streams."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics, exact_tokens: int, expert_storage: str):
        super().__init__()
        self.dtype, self.exact_tokens = numerics.dtype, exact_tokens
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config, exact_tokens)
        self.hc_ffn = HyperConnection(config, exact_tokens)
        self.attn = Attention(config, layer, numerics, exact_tokens)
        self.ffn = MoE(config, numerics, exact_tokens, layer >= config.num_hidden_layers, expert_storage)

    def forward(
        self, x: Tensor, pre_mix: Tensor, rotary: Rotary, call: Call, state: State, selection: Selection
    ) -> tuple[Tensor, Tensor, Selection]:
        """Streams x [B, T, hc, d] fp32 and the previous sublayer's pre [B, T, hc] to the new streams, pre and selection.

        The pre coefficients are delayed by one sublayer: attention collapses with the previous layer's, the experts with
        those made before this layer's attention; post and comb are the sublayer's own.
        """
        attn_pre, attn_post, attn_comb = self.hc_attn(x)
        y, selection = self.attn(self.attn_norm(collapse(x, pre_mix, self.dtype, self.exact_tokens)), rotary, call, state, selection)
        x = expand(y, x, attn_post, attn_comb, self.exact_tokens)
        ffn_pre, ffn_post, ffn_comb = self.hc_ffn(x)
        y = self.ffn(self.ffn_norm(collapse(x, attn_pre, self.dtype, self.exact_tokens)))
        return expand(y, x, ffn_post, ffn_comb, self.exact_tokens), ffn_pre, selection


class DeepseekV41Model(nn.Module):
    """The text backbone. Parameters are uninitialised until ``loading.load_model`` fills them.

    ``exact_tokens``: calls of at most this many tokens per sequence, which decode and verification are, compute every row
    by itself (rows.py).
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, max_seq_len: int, expert_storage: str = "decoded"):
        super().__init__()
        self.config, self.numerics, self.max_seq_len = config, numerics, max_seq_len
        self.exact_tokens = config.dspark_block_size + 1
        exact, layers = self.exact_tokens, config.num_hidden_layers
        self.embed = Embedding(config.vocab_size, config.hidden_size, numerics.dtype)
        self.layers = nn.ModuleList(Block(config, layer, numerics, exact, expert_storage) for layer in range(layers))
        for layout in engram_layouts(config):
            self.layers[layout.layer].engram = Engram(config, layout, numerics, exact)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, torch.float32, exact)
        for name, compressed in (("rope_plain", False), ("rope_compressed", True)):
            self.register_buffer(name, rope_table(config, compressed, max_seq_len), persistent=False)
        self.register_buffer("token_map", torch.zeros(config.vocab_size, dtype=torch.int32), persistent=False)
        self.state_names = [spec.name for spec in self.state_spec(1)]

    def state_spec(self, slots: int) -> list[StateSpec]:
        """The declared state for ``slots`` sequences of at most ``max_seq_len`` positions."""
        return state_spec(self.config, self.numerics.dtype, slots, self.max_seq_len)

    def forward(
        self, ids: Tensor, start: Tensor, length: Tensor, slot: Tensor, rank: Tensor, *state: Tensor, read_len: int
    ) -> tuple[Tensor, ...]:
        """One call of T tokens for each of B sequences.

        ids [B, T] int64; start, length, slot [B]: position of the first token, real tokens (the rest is padding), state
        slot (-1: inactive row); rank [1] int: this process's, 0 where there is one; ``state`` in the order of
        ``state_spec``; ``read_len``: positions whose compressed entries may be read, at least max(start + length).
        Returns (hidden [B, T, d] after the final norm, taps [B, T, targets * d], *state). State is updated in place.
        """
        call = make_call(start, length, slot, ids.shape[1], read_len)
        store = State(self.state_names, state)
        rotary = Rotary(self.rope_plain, self.rope_compressed)
        kv_of = self._engram(ids, call, store)
        dtype = self.numerics.dtype
        x = self.embed(ids, rank).unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).float()
        pre_mix = torch.zeros(x.shape[:3], device=x.device)
        pre_mix[..., 0] = 1.0
        selection, taps = Selection(), []
        for index, layer in enumerate(self.layers):
            if index in kv_of:
                x = layer.engram(x, kv_of[index])
            if index in self.config.dspark_target_layer_ids:
                taps.append(x.mean(2).to(dtype))
            x, pre_mix, selection = layer(x, pre_mix, rotary, call, store, selection)
        hidden = self.norm(collapse(x, pre_mix, dtype, self.exact_tokens))
        return hidden, torch.cat(taps, -1) if taps else hidden[..., :0], *state

    def logits(self, hidden: Tensor) -> Tensor:
        """The head in fp32: hidden [B, T, d] after the final norm to logits [B, T, vocab] fp32."""
        return self.head(hidden)

    def _engram(self, ids: Tensor, call: Call, state: State) -> dict[int, Tensor]:
        """Looked-up keys and values of every engram layer, and the look-back state moved on."""
        if not self.config.engram_layer_ids:
            return {}
        n = self.config.engram_max_ngram_size
        compressed = self.token_map[ids]
        stretch = windows(state.history("tok", call, n - 1), compressed)
        state.write_ring("tok", compressed, call)
        alive = call.start[:, None] + torch.arange(1 - n, ids.shape[1], device=ids.device) >= 0
        pad = self.token_map[self.config.engram_pad_token_id]
        grams = lookback(stretch, alive, n, pad)
        return {layer: self.layers[layer].engram.look_up(grams) for layer in self.config.engram_layer_ids}
