# SPDX-License-Identifier: Apache-2.0
"""Configurations: what is read, and every refusal by the name of its key."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modeling_deepseek_v41.config import ModelConfig, config_from_dict, load_config
from modeling_deepseek_v41.errors import ConfigError

DATA = Path(__file__).parent / "data"
TINY = json.loads((DATA / "golden" / "tiny_a" / "ckpt" / "config.json").read_text(encoding="utf-8"))


def flat() -> dict[str, Any]:
    """tiny_a's keys on one level."""
    outer = {key: value for key, value in TINY.items() if key not in ("text_config", "vision_config")}
    return copy.deepcopy(outer | TINY["text_config"])


def changed(**values: Any) -> dict[str, Any]:
    """tiny_a, flat, with other values."""
    return flat() | values


def message(raw: dict[str, Any]) -> str:
    """The error that ``raw`` is refused with."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(raw, source="here.json")
    assert str(caught.value).startswith("here.json: ")
    return str(caught.value)


def test_nested_and_flat_layouts_give_the_same_configuration() -> None:
    nested = config_from_dict(copy.deepcopy(TINY))
    assert config_from_dict(flat() | {"vision_config": TINY["vision_config"]}) == nested
    assert nested.has_vision and not config_from_dict(flat()).has_vision


def test_the_release_is_read() -> None:
    release = load_config(DATA / "release_config.json")
    assert (release.hidden_size, release.num_hidden_layers, release.n_routed_experts) == (5120, 40, 384)
    assert release.rope_scaling is not None and release.rope_scaling.factor == 16
    assert release.unknown_keys == ()
    assert release.engram_columns == 24
    masking = [layer for layer in release.index_source_layer_ids if release.masks_with_candidates(layer)]
    assert masking == [24, 28, 32, 36]


def test_sources_are_the_nearest_before() -> None:
    config = config_from_dict(flat())
    assert [config.kv_source(layer) for layer in range(2, 8)] == [2, 2, 4, 4, 4, 4]
    assert [config.index_source(layer) for layer in range(2, 8)] == [2, 2, 4, 4, 6, 6]
    assert [config.masks_with_candidates(layer) for layer in (2, 4, 6)] == [False, False, True]
    none = config_from_dict(changed(candidate_source_layer_id=-1))
    assert not any(none.masks_with_candidates(layer) for layer in range(8))


def test_drafter_expert_keys_at_0_fall_back() -> None:
    assert config_from_dict(flat()).experts(True) == (8, 2)
    assert config_from_dict(changed(dspark_n_routed_experts=0, dspark_num_experts_per_tok=0)).experts(True) == (16, 3)
    assert config_from_dict(changed(dspark_n_routed_experts=0)).experts(True) == (16, 2)


@pytest.mark.parametrize(("eos", "ids"), [(1, (1,)), ([1, 5], (1, 5)), (None, ())])
def test_eos_may_be_one_id_several_or_none(eos: Any, ids: tuple[int, ...]) -> None:
    assert config_from_dict(changed(eos_token_id=eos)).eos_token_ids == ids


def test_unknown_keys_are_named_and_private_ones_are_not() -> None:
    assert config_from_dict(changed(shoe_size=43, _note="x")).unknown_keys == ("shoe_size",)


def test_a_configuration_without_compression_engram_drafter_or_yarn_is_consistent() -> None:
    config = config_from_dict(
        changed(
            compress_ratios=[0] * 8, kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=-1,
            engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0, rope_scaling=None, swiglu_limit=0,
        )
    )  # fmt: skip
    assert config.rope_scaling is None and config.engram_columns == 6


REQUIRED = sorted(
    key
    for key in TINY["text_config"]
    if key in ModelConfig.__dataclass_fields__ and key not in ("rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id")
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    raw = flat()
    del raw[key]
    assert f"{key}: this key is missing" in message(raw)


WRONG_TYPES = [
    ("hidden_size", "128", "an integer"),
    ("hidden_size", 128.0, "an integer"),
    ("hidden_size", True, "an integer"),
    ("hidden_size", None, "an integer"),
    ("rms_norm_eps", "1e-20", "a finite number"),
    ("rms_norm_eps", float("nan"), "a finite number"),
    ("rope_theta", float("inf"), "a finite number"),
    ("norm_topk_prob", 1, "true or false"),
    ("compress_ratios", 0, "a list of integers"),
    ("compress_ratios", [0, "2"], "a list of integers"),
    ("kv_source_layer_ids", [2.0, 4], "a list of integers"),
    ("bos_token_id", "0", "an integer"),
    ("text_config", [], "an object"),
    ("rope_scaling", "yarn", "an object or null"),
    ("quantization_config", "fp8", "an object"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG_TYPES)
def test_a_wrong_type_is_named_with_what_was_found(key: str, value: Any, expected: str) -> None:
    text = message(changed(**{key: value}))
    assert f"{key}: expected {expected}" in text and repr(value) in text


FIXED = [
    ("num_key_value_heads", 2),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("tie_word_embeddings", True),
    ("scoring_func", "softmax"),
    ("topk_method", "greedy"),
    ("n_shared_experts", 2),
]


@pytest.mark.parametrize(("key", "value"), FIXED)
def test_a_value_without_a_reading_is_refused_and_may_be_absent(key: str, value: Any) -> None:
    assert f"{key}: only" in message(changed(**{key: value}))
    raw = flat()
    raw.pop(key)
    config_from_dict(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [("quant_method", "int8"), ("activation_scheme", "static"), ("weight_block_size", [128, 128]), ("scale_fmt", "fp32"),
     ("expert_dtype", "fp8")],
)  # fmt: skip
def test_another_quantisation_is_refused(key: str, value: Any) -> None:
    raw = flat()
    raw["quantization_config"][key] = value
    assert f"quantization_config.{key}: only" in message(raw)


@pytest.mark.parametrize("value", [{"rope_type": "linear", "factor": 2}, {"factor": 2}])
def test_another_rope_scaling_is_refused(value: dict[str, Any]) -> None:
    assert "rope_scaling.rope_type" in message(changed(rope_scaling=value))


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, None, "4", True, float("nan")])
def test_rope_scaling_numbers_are_above_0(key: str, value: Any) -> None:
    raw = flat()
    raw["rope_scaling"][key] = value
    assert f"rope_scaling.{key}: expected a number above 0" in message(raw)


def test_rope_scaling_may_name_its_type_the_old_way() -> None:
    raw = flat()
    raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    assert config_from_dict(raw).rope_scaling is not None


POSITIVE = [
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "compress_rope_theta", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor", "sliding_window",
    "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters",
]  # fmt: skip


@pytest.mark.parametrize("key", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_above_0(key: str, value: int) -> None:
    assert f"{key}: expected more than 0, found {value}" in message(changed(**{key: value}))


NOT_NEGATIVE = [
    "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_pad_token_id",
    "engram_compressed_vocab_size", "num_nextn_predict_layers", "dspark_block_size", "dspark_noise_token_id",
    "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok", "swiglu_limit", "hc_eps",
    "candidate_topk_blocks", "candidate_block_size",
]  # fmt: skip


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_optional_sizes_are_0_or_more(key: str) -> None:
    assert f"{key}: expected 0 or more, found -1" in message(changed(**{key: -1}))


def sources(**values: Any) -> dict[str, Any]:
    """tiny_a's layers without candidates, so that each refusal stands alone."""
    return changed(candidate_source_layer_id=-1, **values)


REFUSED: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    ("hidden size in groups of 32", lambda: changed(hidden_size=120), "hidden_size: expected a multiple of 32"),
    ("expert width in groups of 32", lambda: changed(moe_intermediate_size=50), "moe_intermediate_size: expected a multiple"),
    ("q rank in groups of 32", lambda: changed(q_lora_rank=40), "q_lora_rank: expected a multiple of 32"),
    ("head size in groups of 32", lambda: changed(head_dim=100), "head_dim: expected a multiple of 32"),
    ("index head size in groups of 32", lambda: changed(index_head_dim=48), "index_head_dim: expected a multiple of 32"),
    ("output rank in groups of 32", lambda: changed(o_lora_rank=3), "o_groups * o_lora_rank: expected a multiple of 32"),
    ("rotary pairs", lambda: changed(qk_rope_head_dim=31), "qk_rope_head_dim: expected an even number"),
    ("rotary part of a head", lambda: changed(qk_rope_head_dim=130), "head_dim: 128 is less than qk_rope_head_dim 130"),
    ("rotary part of an index head", lambda: changed(qk_rope_head_dim=66), "index_head_dim: 64 is less than qk_rope_head_dim"),
    ("heads in groups", lambda: changed(o_groups=3, o_lora_rank=32), "o_groups: 3 does not divide num_attention_heads 8"),
    ("experts per token", lambda: changed(num_experts_per_tok=17), "17 experts per token of 16 routed experts"),
    ("drafter's experts per token", lambda: changed(dspark_num_experts_per_tok=9), "9 experts per token of 8 routed experts"),
    ("end id in the vocabulary", lambda: changed(eos_token_id=[1, 512]), "token id 512 is outside vocab_size 512"),
    ("begin id in the vocabulary", lambda: changed(bos_token_id=-1), "token id -1 is outside vocab_size 512"),
    ("padding id in the vocabulary", lambda: changed(pad_token_id=512), "token id 512 is outside vocab_size 512"),
    ("one ratio per layer", lambda: changed(compress_ratios=[0] * 10), "compress_ratios: expected 8 layers + 3 drafter stages"),
    ("negative ratio", lambda: sources(compress_ratios=[-1, *[0] * 10]), "compress_ratios: expected 0 or more everywhere"),
    (
        "ratio of a drafter stage",
        lambda: changed(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 0, 1, 0]),
        "compress_ratios: a drafter stage has no compressed KV",
    ),
    ("order of sources", lambda: sources(kv_source_layer_ids=[4, 2]), "kv_source_layer_ids: expected ascending layer ids"),
    ("repeated index source", lambda: sources(index_source_layer_ids=[2, 4, 4]), "index_source_layer_ids: expected ascending"),
    ("source outside", lambda: sources(index_source_layer_ids=[2, 4, 8]), "index_source_layer_ids: layer 8 is outside 0..7"),
    ("source without compression", lambda: sources(kv_source_layer_ids=[1, 2, 4], index_source_layer_ids=[1, 2, 4]),
     "kv_source_layer_ids: layer 1 has compress_ratios 0"),
    ("kv source that is no index source", lambda: sources(index_source_layer_ids=[2, 6]),
     "kv_source_layer_ids: layer 4 is not in index_source_layer_ids"),
    ("reader without a source", lambda: sources(kv_source_layer_ids=[4], index_source_layer_ids=[4, 6]),
     "kv_source_layer_ids: layer 2 (ratio 2) has no source at or before it"),
    ("reader of another ratio", lambda: sources(kv_source_layer_ids=[2], index_source_layer_ids=[2, 6]),
     "compress_ratios: layer 4 has 1, its source layer 2 has 2"),
    ("candidate source that is none", lambda: changed(candidate_source_layer_id=5),
     "candidate_source_layer_id: 5 is neither -1 nor an index source"),
    ("candidates of another ratio", lambda: changed(candidate_source_layer_id=2),
     "candidate_source_layer_id: index source 4 has ratio 1, the candidate source 2"),
    ("no candidate blocks", lambda: changed(candidate_topk_blocks=0), "candidate_topk_blocks, candidate_block_size: 0"),
    ("empty candidate blocks", lambda: changed(candidate_block_size=0), "candidate_topk_blocks, candidate_block_size: 0"),
    ("too few candidates", lambda: changed(candidate_topk_blocks=2), "index_topk needs 8"),
    ("repeated engram", lambda: changed(engram_layer_ids=[1, 1]), "engram_layer_ids: repeated layers"),
    ("engram outside", lambda: changed(engram_layer_ids=[1, 8]), "engram_layer_ids: layer 8 is outside"),
    ("one table per engram", lambda: changed(engram_num_embeddings=[1362]), "engram_num_embeddings: expected 2 entries"),
    ("unigrams only", lambda: changed(engram_max_ngram_size=1), "engram_max_ngram_size: expected 2 or more"),
    ("engram without heads", lambda: changed(engram_n_heads=0), "engram_n_heads: expected more than 0"),
    ("engram without width", lambda: changed(engram_head_dim=0), "engram_head_dim: expected more than 0"),
    ("engram without rows", lambda: changed(engram_vocab_size=0), "engram_vocab_size: expected more than 0"),
    ("engram without vocabulary", lambda: changed(engram_compressed_vocab_size=0), "engram_compressed_vocab_size: expected"),
    ("engram width in groups", lambda: changed(engram_head_dim=40), "engram_head_dim: expected a multiple of 32"),
    ("engram pad id", lambda: changed(engram_pad_token_id=512), "engram_pad_token_id: 512 is outside vocab_size"),
    ("drafter without targets", lambda: changed(dspark_target_layer_ids=[]), "dspark_target_layer_ids: expected distinct"),
    ("repeated target", lambda: changed(dspark_target_layer_ids=[5, 5]), "dspark_target_layer_ids: expected distinct layers"),
    ("target outside", lambda: changed(dspark_target_layer_ids=[5, 8]), "dspark_target_layer_ids: layer 8 is outside"),
    ("empty draft block", lambda: changed(dspark_block_size=0), "dspark_block_size: expected 1 or more"),
    ("empty Markov head", lambda: changed(dspark_markov_rank=0), "dspark_markov_rank: expected 1 or more"),
    ("noise id", lambda: changed(dspark_noise_token_id=512), "dspark_noise_token_id: 512"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_an_inconsistent_configuration_is_refused_by_name(raw: Callable[[], dict[str, Any]], words: str) -> None:
    assert words in message(raw())


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        load_config(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: is not valid JSON"):
        load_config(tmp_path)
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: expected a JSON object"):
        load_config(file)
