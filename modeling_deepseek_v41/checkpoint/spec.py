# SPDX-License-Identifier: Apache-2.0
"""The names, stored types and shapes of every tensor that a configuration asks for (docs/model.md, sections 11 and 12)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..errors import CheckpointError

BLOCK = 32
"""Rows and columns of a weight that share one ue8m0 scale; fp4 weights and engram rows share one per 32 columns."""

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""Bytes per element of the stored types; an I8 element holds two fp4 values."""

GROUPS = (
    "embedding/head", "norms", "attention", "compressor+indexer", "hyper-connections", "router", "experts",
    "shared experts", "engram tables", "engram other", "drafter", "vision",
)  # fmt: skip
"""Every group that ``group_of`` gives, in the order of a table."""

_GROUP_MARKS = (
    (".attn.compressor.", "compressor+indexer"),
    (".attn.indexer.", "compressor+indexer"),
    (".attn.", "attention"),
    (".hc_", "hyper-connections"),
    (".ffn.experts.", "experts"),
    (".ffn.shared_experts.", "shared experts"),
    (".ffn.gate.", "router"),
    (".engram.embed.", "engram tables"),
    (".engram.", "engram other"),
)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One stored tensor: its safetensors dtype string, its stored shape and the group it is counted in."""

    dtype: str
    shape: tuple[int, ...]
    group: str

    @property
    def nbytes(self) -> int:
        """The bytes it takes in a file."""
        return math.prod(self.shape) * BYTES[self.dtype]


def is_vision(name: str) -> bool:
    """Whether ``name`` belongs to image input alone: a text run leaves it unread and says so."""
    return (
        name.startswith(("vision.", "aligner."))
        or name in ("image_start", "image_end", "image_newline")
        or name.endswith(".ffn.gate.bias_vl")
    )


def group_of(name: str) -> str:
    """The group (one of GROUPS) that the tensor ``name`` is counted in."""
    if is_vision(name):
        return "vision"
    if name.startswith("mtp."):
        return "drafter"
    if name in ("embed.weight", "head.weight"):
        return "embedding/head"
    return next((group for mark, group in _GROUP_MARKS if mark in name), "norms")


class _Names(dict[str, TensorSpec]):
    def add(self, dtype: str, name: str, *shape: int) -> None:
        self[name] = TensorSpec(dtype, shape, group_of(name))

    def bf16(self, name: str, *shape: int) -> None:
        self.add("BF16", name, *shape)

    def f32(self, name: str, *shape: int) -> None:
        self.add("F32", name, *shape)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        self.add("F8_E4M3", f"{name}.weight", rows, columns)
        self.add("F8_E8M0", f"{name}.scale", math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))

    def fp8_rows(self, name: str, rows: int, columns: int) -> None:
        self.add("F8_E4M3", f"{name}.weight", rows, columns)
        self.add("F8_E8M0", f"{name}.scale", rows, math.ceil(columns / BLOCK))

    def fp4(self, name: str, rows: int, columns: int) -> None:
        self.add("I8", f"{name}.weight", rows, columns // 2)
        self.add("F8_E8M0", f"{name}.scale", rows, math.ceil(columns / BLOCK))


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the text model and its drafter, by name, layer after layer.

    ``ffn.gate.bias_vl`` is among them only where the configuration has a vision tower. The vision tower itself is not:
    see ``is_vision`` and ``vision_tensors``.
    """
    names = _Names()
    names.bf16("embed.weight", config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        if layer in config.engram_layer_ids:
            _engram(names, config, prefix + "engram.", config.engram_num_embeddings[config.engram_layer_ids.index(layer)])
        _block(names, config, prefix, is_drafter=False)
        _sources(names, config, layer, prefix + "attn.")
    names.bf16("norm.weight", config.hidden_size)
    names.bf16("head.weight", config.vocab_size, config.hidden_size)
    for stage in range(config.num_nextn_predict_layers):
        _block(names, config, f"mtp.{stage}.", is_drafter=True)
    if config.num_nextn_predict_layers:
        _drafter_ends(names, config)
    return dict(names)


def _block(names: _Names, config: ModelConfig, prefix: str, is_drafter: bool) -> None:
    dim, streams, heads = config.hidden_size, config.hc_mult, config.num_attention_heads
    for sublayer in ("attn", "ffn"):
        mixes = (2 + streams) * streams
        names.bf16(f"{prefix}{sublayer}_norm.weight", dim)
        names.f32(f"{prefix}hc_{sublayer}_fn", mixes, streams * dim)
        names.f32(f"{prefix}hc_{sublayer}_base", mixes)
        names.f32(f"{prefix}hc_{sublayer}_scale", 3)
    attn, latent, out = prefix + "attn.", config.head_dim, config.o_groups * config.o_lora_rank
    names.f32(attn + "attn_sink", heads)
    names.fp8(attn + "wq_a", config.q_lora_rank, dim)
    names.bf16(attn + "q_norm.weight", config.q_lora_rank)
    names.fp8(attn + "wq_b", heads * latent, config.q_lora_rank)
    names.fp8(attn + "wkv", latent, dim)
    names.bf16(attn + "kv_norm.weight", latent)
    names.fp8(attn + "wo_a", out, heads * latent // config.o_groups)
    names.fp8(attn + "wo_b", dim, out)
    experts, _ = config.experts(is_drafter)
    inner = config.moe_intermediate_size
    names.bf16(prefix + "ffn.gate.weight", experts, dim)
    names.f32(prefix + "ffn.gate.bias", experts)
    if config.has_vision:
        names.f32(prefix + "ffn.gate.bias_vl", experts)
    for linear, rows, columns in (("w1", inner, dim), ("w2", dim, inner), ("w3", inner, dim)):
        names.fp8(f"{prefix}ffn.shared_experts.{linear}", rows, columns)
    for expert in range(experts):
        for linear, rows, columns in (("w1", inner, dim), ("w2", dim, inner), ("w3", inner, dim)):
            names.fp4(f"{prefix}ffn.experts.{expert}.{linear}", rows, columns)


def _sources(names: _Names, config: ModelConfig, layer: int, attn: str) -> None:
    dim, latent, key = config.hidden_size, config.head_dim, config.index_head_dim
    if layer in config.kv_source_layer_ids:
        names.bf16(attn + "compressor.wkv.weight", latent, dim)
        if config.compress_ratios[layer] > 1:
            names.bf16(attn + "compressor.wgate.weight", latent, dim)
        names.bf16(attn + "compressor.norm.weight", latent)
        names.bf16(attn + "indexer.wk.weight", key, latent)
        names.bf16(attn + "indexer.k_norm.weight", key)
    if layer in config.index_source_layer_ids:
        names.fp8(attn + "indexer.wq_b", config.index_n_heads * key, config.q_lora_rank)
        names.bf16(attn + "indexer.weights_proj.weight", config.index_n_heads, dim)


def _engram(names: _Names, config: ModelConfig, prefix: str, rows: int) -> None:
    dim, streams, width = config.hidden_size, config.hc_mult, config.engram_head_dim
    names.fp8_rows(prefix + "embed", rows, width)
    names.fp8(prefix + "wkv", (streams + 1) * dim, config.engram_columns * width)
    names.bf16(prefix + "q_weight", streams, dim)
    names.bf16(prefix + "k_weight", streams, dim)


def _drafter_ends(names: _Names, config: ModelConfig) -> None:
    dim, rank = config.hidden_size, config.dspark_markov_rank
    names.fp8("mtp.0.main_proj", dim, len(config.dspark_target_layer_ids) * dim)
    names.bf16("mtp.0.main_norm.weight", dim)
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    names.bf16(last + "norm.weight", dim)
    names.bf16(last + "markov_head.embed.weight", config.vocab_size, rank)
    names.bf16(last + "markov_head.head.weight", config.vocab_size, rank)
    names.bf16(last + "confidence_head.proj.weight", 1, dim + rank)


def vision_tensors(vision: Mapping[str, Any], hidden_size: int) -> dict[str, TensorSpec]:
    """The tensors of the vision tower and its aligner for a ``vision_config``; this package writes and counts them only.

    Raises CheckpointError where ``vision`` lacks one of the sizes.
    """
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "patch_size", "downsample_ratio")
    for key in keys:
        if type(vision.get(key)) is not int:
            raise CheckpointError(f"vision_config.{key}: expected an integer, found {vision.get(key)!r}")
    layers, width, inner, patch, ratio = (vision[key] for key in keys)
    names = _Names()
    names.bf16("vision.patch_embed.proj.weight", width, 3 * patch * patch)
    names.bf16("vision.patch_embed.proj.bias", width)
    for layer in range(layers):
        block = f"vision.blocks.{layer}."
        names.bf16(block + "norm1.weight", width)
        names.bf16(block + "attn.wqkv.weight", 3 * width, width)
        names.bf16(block + "attn.wqkv.bias", 3 * width)
        names.bf16(block + "attn.wo.weight", width, width)
        names.bf16(block + "attn.wo.bias", width)
        names.bf16(block + "norm2.weight", width)
        names.bf16(block + "mlp.w1.weight", 2 * inner, width)
        names.bf16(block + "mlp.w2.weight", width, inner)
    names.bf16("vision.norm.weight", width)
    for linear, columns in (("w1", width * ratio * ratio), ("w2", hidden_size)):
        names.bf16(f"aligner.{linear}.weight", hidden_size, columns)
        names.bf16(f"aligner.{linear}.bias", hidden_size)
    for name in ("image_start", "image_end", "image_newline"):
        names.bf16(name, hidden_size)
    return dict(names)
