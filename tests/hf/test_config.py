# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face configuration: both layouts in, both layouts out, nothing lost on the way."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from modeling_deepseek_v41 import DeepseekV41Config
from modeling_deepseek_v41.config import ModelConfig, config_from_dict
from modeling_deepseek_v41.errors import ConfigError

RELEASE = Path(__file__).resolve().parents[1] / "data" / "release_config.json"


@pytest.fixture
def release() -> dict[str, Any]:
    """The release's config.json."""
    found: dict[str, Any] = json.loads(RELEASE.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def flat(release: dict[str, Any]) -> dict[str, Any]:
    """The same keys without nesting."""
    text = release.pop("text_config")
    del text["model_type"]
    return release | text


def numbers(config: ModelConfig) -> dict[str, Any]:
    """A model configuration's fields without where it came from."""
    return {key: value for key, value in dataclasses.asdict(config).items() if key not in ("source", "unknown_keys")}


def test_reads_the_release(release: dict[str, Any]) -> None:
    config = DeepseekV41Config(**release)
    text = release["text_config"]
    for key, value in text.items():
        if key != "model_type":
            assert getattr(config, key) == value
            assert getattr(config.text_config, key) == value
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert config.image_token_id == release["image_token_id"]
    assert config.vision_config == release["vision_config"]
    assert config.quantization_config == release["quantization_config"]
    assert numbers(config.to_model_config()) == numbers(config_from_dict(release))
    assert not config.to_model_config().unknown_keys


def test_the_release_comes_back_from_every_way_round(release: dict[str, Any], tmp_path: Path) -> None:
    config = DeepseekV41Config(**release)
    config.save_pretrained(tmp_path)
    for found in (config.to_release_dict(), json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))):
        assert found | {"transformers_version": ""} == release | {"transformers_version": ""}
    ways = [
        DeepseekV41Config.from_dict(config.to_dict()),
        DeepseekV41Config(**config.to_dict()),
        DeepseekV41Config.from_dict(config.to_diff_dict()),
        DeepseekV41Config.from_dict(json.loads(config.to_json_string())),
        DeepseekV41Config.from_dict(json.loads(config.to_json_string(use_diff=False))),
        DeepseekV41Config.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
    ]
    for again in ways:
        assert isinstance(again, DeepseekV41Config)
        assert again.to_release_dict() == config.to_release_dict()
        assert numbers(again.to_model_config()) == numbers(config.to_model_config())
    assert ways[0] == config
    assert numbers(config_from_dict(config.to_dict())) == numbers(config.to_model_config())


def test_flat_is_the_same_configuration(flat: dict[str, Any], release: dict[str, Any]) -> None:
    config = DeepseekV41Config(**flat)
    nested = DeepseekV41Config(**json.loads(RELEASE.read_text(encoding="utf-8")))
    assert config == nested
    assert config.to_release_dict()["text_config"]["hidden_size"] == flat["hidden_size"]
    assert numbers(config.to_model_config()) == numbers(config_from_dict(flat))


def test_flat_keys_of_others_have_values_where_the_file_is_silent(flat: dict[str, Any]) -> None:
    for key in ("num_key_value_heads", "tie_word_embeddings", "hidden_act", "use_cache", "pad_token_id", "image_token_id"):
        del flat[key]
    config = DeepseekV41Config(**flat)
    assert config.num_key_value_heads == 1
    assert config.tie_word_embeddings is False
    assert config.hidden_act == "silu"
    assert config.use_cache is True
    assert config.pad_token_id is None
    assert config.image_token_id is None


def test_to_dict_is_flat_and_every_key_an_attribute(release: dict[str, Any]) -> None:
    config = DeepseekV41Config(**release)
    found = config.to_dict()
    assert "text_config" not in found
    assert found["model_type"] == "deepseek_v41"
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rope_theta",
    ):
        assert found[key] == release["text_config"][key]
    assert all(hasattr(config, key) for key in found)


def test_text_config_is_the_configuration_itself(release: dict[str, Any]) -> None:
    config = DeepseekV41Config(**release)
    assert config.get_text_config() is config
    assert config.get_text_config(decoder=True) is config
    config.max_position_embeddings = 4096
    assert config.text_config.max_position_embeddings == 4096
    assert config.to_release_dict()["text_config"]["max_position_embeddings"] == 4096
    assert config.to_model_config().max_position_embeddings == 4096


def test_takes_a_text_config_object_and_a_missing_rope_scaling(flat: dict[str, Any]) -> None:
    del flat["rope_scaling"]
    config = DeepseekV41Config(text_config=DeepseekV41Config(**flat))
    assert isinstance(config, PretrainedConfig)
    assert config.rope_scaling is None
    assert config.to_model_config().rope_scaling is None
    assert DeepseekV41Config.from_dict(config.to_dict()) == config


def test_several_end_tokens(release: dict[str, Any]) -> None:
    release["eos_token_id"] = [1, 7]
    config = DeepseekV41Config(**release)
    assert config.to_model_config().eos_token_ids == (1, 7)
    assert DeepseekV41Config.from_dict(config.to_dict()).eos_token_id == [1, 7]


def test_unknown_keys_are_kept(release: dict[str, Any]) -> None:
    release["text_config"]["something_new"] = 5
    config = DeepseekV41Config(**release)
    assert config.something_new == 5
    assert config.to_release_dict()["text_config"]["something_new"] == 5
    assert config.to_model_config().unknown_keys == ("something_new",)


def test_equality_is_by_value(release: dict[str, Any]) -> None:
    config, other = DeepseekV41Config(**release), DeepseekV41Config(**release)
    assert config == other
    other.sliding_window = 64
    assert config != other


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "5120", "hidden_size: expected an integer, found '5120'"),
        ("num_key_value_heads", 8, "num_key_value_heads: only 1 is defined"),
        ("compress_ratios", [0], "compress_ratios: expected 40 layers"),
        ("rope_scaling", {"rope_type": "linear"}, "rope_scaling.rope_type: only 'yarn'"),
    ],
)
def test_wrong_values_are_named(release: dict[str, Any], key: str, value: Any, message: str) -> None:
    release["text_config"][key] = value
    with pytest.raises(ConfigError, match=message):
        DeepseekV41Config(**release)


def test_missing_and_misplaced_keys_are_named(release: dict[str, Any], flat: dict[str, Any]) -> None:
    del flat["hc_mult"]
    with pytest.raises(ConfigError, match="hc_mult: this key is missing"):
        DeepseekV41Config(**flat)
    with pytest.raises(ConfigError, match="text_config: expected an object"):
        DeepseekV41Config(text_config=3)  # type: ignore[arg-type]


def test_errors_name_the_folder(release: dict[str, Any], tmp_path: Path) -> None:
    del release["text_config"]["engram_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(release), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{tmp_path}: engram_layer_ids: this key is missing"):
        AutoConfig.from_pretrained(tmp_path)


def test_the_empty_configuration_holds_defaults_only() -> None:
    config = DeepseekV41Config()
    assert config.model_type == "deepseek_v41"
    assert config.num_key_value_heads == 1
    with pytest.raises(ConfigError, match="vocab_size: this key is missing"):
        config.to_model_config()
