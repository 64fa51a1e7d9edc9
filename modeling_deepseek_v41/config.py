# SPDX-License-Identifier: Apache-2.0
"""The release's config.json, nested or flat, as one validated, frozen object (docs/model.md, section 12)."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError

QDQ_GROUP = 32
"""Values that share one scale in activations, weights and window KV (docs/model.md, section 1)."""

FIXED = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
}
"""Keys that may be absent; where present, no other value has a consistent reading."""

FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

LARGEST_INT, LARGEST_FLOAT = 10**12, 1e30
"""Beyond these no number of a configuration is meant, and fp32 or 64-bit arithmetic on it could leave its range."""

MOST = {
    "hc_sinkhorn_iters": 1000, "hc_mult": 64, "n_routed_experts": 1 << 16, "dspark_n_routed_experts": 1 << 16,
    "sliding_window": 1 << 20, "dspark_block_size": 1 << 10, "candidate_block_size": 1 << 20, "index_topk": 1 << 20,
    "rms_norm_eps": 1.0, "hc_eps": 1.0, "num_hidden_layers": 1 << 12, "num_nextn_predict_layers": 1 << 8,
    "engram_max_ngram_size": 64, "engram_n_heads": 1 << 10,
}  # fmt: skip
"""Upper bounds of numbers that decide how long or how large a computation is."""

WITHOUT_EFFECT = {
    "architectures", "attention_dropout", "auto_map", "dtype", "initializer_range", "model_type", "quantization_config",
    "text_config", "torch_dtype", "transformers_version", "use_cache", "vision_config", "image_token_id",
}  # fmt: skip
"""Keys that are known and do not change what this package computes."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with a compression ratio above 0."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every number of the text model and its drafter; field names are the keys of the release's config.json.

    Lists become tuples. ``image_token_id`` and ``has_vision`` come from the outer level. ``unknown_keys`` names keys
    that this package does not know, so that a caller can say that they are ignored.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    rope_scaling: RopeScaling | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    image_token_id: int | None = None
    has_vision: bool = False
    unknown_keys: tuple[str, ...] = ()
    source: str = "config"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids; the release has one, the format allows several."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def engram_columns(self) -> int:
        """Table rows looked up per token: (n-gram sizes) x (heads per size)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed KV ``layer`` (ratio above 0) reads: the nearest source at or before it."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection ``layer`` (ratio above 0) uses: the nearest index source at or before it."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def masks_with_candidates(self, layer: int) -> bool:
        """Whether index source ``layer`` restricts its top-k to the candidate source's blocks."""
        return 0 <= self.candidate_source_layer_id < layer

    def experts(self, is_drafter: bool) -> tuple[int, int]:
        """(routed experts, experts per token) of a backbone layer or a drafter stage; drafter keys at 0 fall back."""
        if not is_drafter:
            return self.n_routed_experts, self.num_experts_per_tok
        return (
            self.dspark_n_routed_experts or self.n_routed_experts,
            self.dspark_num_experts_per_tok or self.num_experts_per_tok,
        )

    def __post_init__(self) -> None:
        _check_values(self)
        _check_layers(self)
        _check_engram(self)
        _check_drafter(self)


def load_config(path: str | Path) -> ModelConfig:
    """Reads ``path`` (a config.json, or a folder that holds one); raises ConfigError that names the file and the key."""
    path = file = Path(path)
    try:
        file = path / "config.json" if path.is_dir() else path
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); give a checkpoint folder with a config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected a JSON object at the top level, found {type(raw).__name__}")
    return config_from_dict(raw, source=str(file))


def config_from_dict(raw: Mapping[str, Any], source: str = "config") -> ModelConfig:
    """Builds the configuration from the release's nested layout or from a flat dictionary of the same keys.

    Raises ConfigError naming ``source`` and the key where a key is missing, has the wrong type, or where the values have
    no consistent reading.
    """
    text = raw.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ConfigError(f"{source}: text_config: expected an object, found {text!r}")
    merged = {key: value for key, value in raw.items() if key != "text_config"} | dict(text or {})
    _check_fixed(merged, source)
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    values: dict[str, Any] = {"source": source, "has_vision": bool(raw.get("vision_config"))}
    for name, field in fields.items():
        if name in ("source", "has_vision", "unknown_keys"):
            continue
        if name == "rope_scaling":
            values[name] = _rope_scaling(merged.get(name), source)
        elif name in merged:
            values[name] = _convert(name, merged[name], field.type, source)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{source}: {name}: this key is missing; the release's config.json has it")
    known = fields.keys() | FIXED.keys() | WITHOUT_EFFECT
    values["unknown_keys"] = tuple(sorted(key for key in merged if key not in known and not key.startswith("_")))
    return ModelConfig(**values)


def _convert(name: str, value: Any, kind: Any, source: str) -> Any:
    optional = kind == int | None or kind == int | tuple[int, ...] | None
    if value is None and optional:
        return None
    if kind is bool:
        good = isinstance(value, bool)
    elif kind is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    elif kind == tuple[int, ...] or (name == "eos_token_id" and isinstance(value, list | tuple)):
        good = isinstance(value, list | tuple) and all(type(item) is int for item in value)
        value = tuple(value) if good else value
    else:
        good = type(value) is int
    if not good:
        expected = {bool: "true or false", float: "a finite number"}.get(kind)
        expected = expected or ("a list of integers" if kind == tuple[int, ...] else "an integer")
        raise ConfigError(f"{source}: {name}: expected {expected}, found {value!r}")
    for number in value if isinstance(value, tuple) else (value,):
        most = LARGEST_FLOAT if kind is float else LARGEST_INT
        if abs(number) > most:
            raise ConfigError(f"{source}: {name}: expected numbers up to {most:g}, found {number!r}")
    return value


def _check_fixed(merged: Mapping[str, Any], source: str) -> None:
    for key, expected in FIXED.items():
        if merged.get(key, expected) != expected:
            raise ConfigError(f"{source}: {key}: only {expected!r} is defined for this model, found {merged[key]!r}")
    quantization = merged.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"{source}: quantization_config: expected an object, found {quantization!r}")
    for key, expected in FIXED_QUANTIZATION.items():
        found = quantization.get(key, expected)
        if (list(found) if isinstance(found, tuple) else found) != expected:
            raise ConfigError(f"{source}: quantization_config.{key}: only {expected!r} can be read, found {found!r}")


def _rope_scaling(value: Any, source: str) -> RopeScaling | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source}: rope_scaling: expected an object or null, found {value!r}")
    kind = value.get("rope_type", value.get("type"))
    if kind != "yarn":
        raise ConfigError(f"{source}: rope_scaling.rope_type: only 'yarn' (or rope_scaling null) is defined, found {kind!r}")
    numbers: dict[str, Any] = {}
    for field in dataclasses.fields(RopeScaling):
        number = value.get(field.name)
        if not isinstance(number, int | float) or isinstance(number, bool) or not 1e-6 <= number <= 1e12:
            raise ConfigError(
                f"{source}: rope_scaling.{field.name}: expected a number above 0 and up to 1e12, found {number!r}"
            )
        numbers[field.name] = number
    return RopeScaling(**numbers)


def _require(condition: bool, config: ModelConfig, message: str) -> None:
    if not condition:
        raise ConfigError(f"{config.source}: {message}")


def _check_values(c: ModelConfig) -> None:
    may_be_zero = {
        "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_pad_token_id",
        "engram_compressed_vocab_size", "num_nextn_predict_layers", "dspark_block_size", "dspark_noise_token_id",
        "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok", "swiglu_limit", "hc_eps",
        "candidate_topk_blocks", "candidate_block_size",
    }  # fmt: skip
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if field.type not in (int, float) or field.name == "candidate_source_layer_id":
            continue
        bound = 0 if field.name in may_be_zero else 1
        most = MOST.get(field.name, math.inf)
        _require(value <= most, c, f"{field.name}: expected at most {most}, found {value}")
        good = value >= 0 if field.type is float and field.name in may_be_zero else value > 0 or (bound == 0 and value == 0)
        _require(good, c, f"{field.name}: expected {'0 or more' if bound == 0 else 'more than 0'}, found {value}")
    multiples = {
        "hidden_size": c.hidden_size, "moe_intermediate_size": c.moe_intermediate_size, "q_lora_rank": c.q_lora_rank,
        "head_dim": c.head_dim, "index_head_dim": c.index_head_dim, "o_groups * o_lora_rank": c.o_groups * c.o_lora_rank,
    }  # fmt: skip
    for name, value in multiples.items():
        _require(value % QDQ_GROUP == 0, c, f"{name}: expected a multiple of {QDQ_GROUP} (one scale each), found {value}")
    for name in ("rope_theta", "compress_rope_theta"):
        _require(getattr(c, name) > 1, c, f"{name}: expected more than 1, found {getattr(c, name)}")
    _require(c.qk_rope_head_dim % 2 == 0, c, f"qk_rope_head_dim: expected an even number, found {c.qk_rope_head_dim}")
    for name in ("head_dim", "index_head_dim"):
        value = getattr(c, name)
        _require(value >= c.qk_rope_head_dim, c, f"{name}: {value} is less than qk_rope_head_dim {c.qk_rope_head_dim}")
    _require(
        c.num_attention_heads % c.o_groups == 0,
        c,
        f"o_groups: {c.o_groups} does not divide num_attention_heads {c.num_attention_heads}",
    )
    for is_drafter in (False, True):
        experts, per_token = c.experts(is_drafter)
        _require(per_token <= experts, c, f"{per_token} experts per token of {experts} routed experts")
    for token in (*c.eos_token_ids, c.bos_token_id, c.pad_token_id):
        _require(token is None or 0 <= token < c.vocab_size, c, f"token id {token} is outside vocab_size {c.vocab_size}")


def _check_layers(c: ModelConfig) -> None:
    layers, stages = c.num_hidden_layers, c.num_nextn_predict_layers
    ratios = c.compress_ratios
    _require(
        len(ratios) == layers + stages,
        c,
        f"compress_ratios: expected {layers} layers + {stages} drafter stages entries, found {len(ratios)}",
    )
    _require(min(ratios) >= 0, c, f"compress_ratios: expected 0 or more everywhere, found {min(ratios)}")
    _require(not any(ratios[layers:]), c, f"compress_ratios: a drafter stage has no compressed KV, found {ratios[layers:]}")
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, key)
        _require(list(ids) == sorted(set(ids)), c, f"{key}: expected ascending layer ids without repeats, found {list(ids)}")
        for layer in ids:
            _require(0 <= layer < layers, c, f"{key}: layer {layer} is outside 0..{layers - 1}")
            _require(ratios[layer] > 0, c, f"{key}: layer {layer} has compress_ratios 0 and so no compressed KV")
    for layer in c.kv_source_layer_ids:
        _require(layer in c.index_source_layer_ids, c, f"kv_source_layer_ids: layer {layer} is not in index_source_layer_ids")
    for layer in range(layers):
        if ratios[layer] == 0:
            continue
        sources = [source for source in c.kv_source_layer_ids if source <= layer]
        _require(bool(sources), c, f"kv_source_layer_ids: layer {layer} (ratio {ratios[layer]}) has no source at or before it")
        _require(
            ratios[sources[-1]] == ratios[layer],
            c,
            f"compress_ratios: layer {layer} has {ratios[layer]}, its source layer {sources[-1]} has {ratios[sources[-1]]}",
        )
    source = c.candidate_source_layer_id
    if source == -1:
        return
    _require(source in c.index_source_layer_ids, c, f"candidate_source_layer_id: {source} is neither -1 nor an index source")
    for layer in c.index_source_layer_ids:
        _require(
            layer < source or ratios[layer] == ratios[source],
            c,
            f"candidate_source_layer_id: index source {layer} has ratio {ratios[layer]}, the candidate source {ratios[source]}",
        )
    _require(c.candidate_topk_blocks > 0 and c.candidate_block_size > 0, c, "candidate_topk_blocks, candidate_block_size: 0")
    reach = (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1
    _require(
        reach >= c.index_topk,
        c,
        f"candidate_topk_blocks x candidate_block_size: they surely reach {reach} positions, index_topk needs {c.index_topk}",
    )


def _check_engram(c: ModelConfig) -> None:
    ids = c.engram_layer_ids
    if not ids:
        return
    _require(len(set(ids)) == len(ids), c, f"engram_layer_ids: repeated layers in {list(ids)}")
    for layer in ids:
        _require(0 <= layer < c.num_hidden_layers, c, f"engram_layer_ids: layer {layer} is outside the backbone")
    _require(
        len(c.engram_num_embeddings) == len(ids),
        c,
        f"engram_num_embeddings: expected {len(ids)} entries, one per engram layer, found {len(c.engram_num_embeddings)}",
    )
    _require(c.engram_max_ngram_size >= 2, c, f"engram_max_ngram_size: expected 2 or more, found {c.engram_max_ngram_size}")
    for name in ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size"):
        _require(getattr(c, name) > 0, c, f"{name}: expected more than 0 where there are engram layers")
    _require(c.engram_head_dim % QDQ_GROUP == 0, c, f"engram_head_dim: expected a multiple of 32, found {c.engram_head_dim}")
    _require(c.engram_pad_token_id < c.vocab_size, c, f"engram_pad_token_id: {c.engram_pad_token_id} is outside vocab_size")


def _check_drafter(c: ModelConfig) -> None:
    if c.num_nextn_predict_layers == 0:
        return
    ids = c.dspark_target_layer_ids
    _require(bool(ids) and len(set(ids)) == len(ids), c, f"dspark_target_layer_ids: expected distinct layers: {list(ids)}")
    for layer in ids:
        _require(0 <= layer < c.num_hidden_layers, c, f"dspark_target_layer_ids: layer {layer} is outside the backbone")
    _require(c.dspark_block_size >= 1, c, f"dspark_block_size: expected 1 or more, found {c.dspark_block_size}")
    _require(c.dspark_markov_rank >= 1, c, f"dspark_markov_rank: expected 1 or more, found {c.dspark_markov_rank}")
    _require(c.dspark_noise_token_id < c.vocab_size, c, f"dspark_noise_token_id: {c.dspark_noise_token_id} >= vocab_size")
