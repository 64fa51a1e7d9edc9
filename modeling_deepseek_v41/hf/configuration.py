# SPDX-License-Identifier: Apache-2.0
"""The release's config.json as a Hugging Face configuration: one flat set of keys, read from and saved in either layout."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from ..config import FIXED, ModelConfig, config_from_dict

OUTER_KEYS = frozenset(
    {
        "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "image_token_id", "model_type", "pad_token_id",
        "quantization_config", "transformers_version", "vision_config",
    }
)  # fmt: skip
"""Keys that stand beside ``text_config`` in the release's layout; every other key of the model stands in it."""

_NOT_FROM_FILE = {"source", "has_vision", "unknown_keys"}
_DEFAULTS: dict[str, Any] = {
    **FIXED, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "image_token_id": None, "rope_scaling": None,
    "use_cache": True,
}  # fmt: skip
_OWN_KEYS = (
    {field.name for field in dataclasses.fields(ModelConfig)} - _NOT_FROM_FILE
    | _DEFAULTS.keys()
    | {"attention_dropout", "initializer_range"}
)


class DeepseekV41Config(PretrainedConfig):
    """Configuration of DeepSeek-V4.1 for transformers.

    Takes the keys of the release's config.json, either nested (``text_config``) or flat, and keeps them once, flat, as
    attributes: ``config.hidden_size``, ``config.num_hidden_layers``, ... ``config.text_config`` reads the same attributes,
    so that ``config.text_config.hidden_size`` works as in the release's layout. ``to_dict`` gives the flat layout, JSON and
    ``save_pretrained`` the release's; both can be read again. ``vision_config`` and ``quantization_config`` stay
    dictionaries: nothing here acts on them.

    Raises ConfigError naming the key where a key is missing, has the wrong type or contradicts another. Without any key it
    is an empty configuration, which transformers makes to look up defaults.
    """

    model_type = "deepseek_v41"
    keys_to_ignore_at_inference = ["past_key_values"]
    rope_scaling = None

    def __init__(self, text_config: "Mapping[str, Any] | PretrainedConfig | None" = None, **kwargs: Any):
        if isinstance(text_config, PretrainedConfig):
            text_config = text_config.to_dict()
        given = dict(kwargs)
        if text_config is not None:
            config_from_dict(kwargs | {"text_config": text_config}, self._source(kwargs))
            given |= {key: value for key, value in text_config.items() if key != "model_type"}
        own = {key: given.pop(key) for key in list(given) if key in _OWN_KEYS}
        given.pop("model_type", None)
        super().__init__(**given)
        for key, value in (_DEFAULTS | own).items():
            setattr(self, key, value)
        if own.keys() - _DEFAULTS.keys():
            self.to_model_config()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As PretrainedConfig.from_dict; errors name the folder where ``name_or_path`` tells it."""
        if kwargs.get("name_or_path"):
            config_dict = config_dict | {"name_or_path": str(kwargs["name_or_path"])}
        return super().from_dict(config_dict, **kwargs)

    @property
    def text_config(self) -> "DeepseekV41Config":
        """This configuration: the text model's keys are its attributes."""
        return self

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "DeepseekV41Config":
        """This configuration, whichever part is asked for."""
        return self

    def to_model_config(self) -> ModelConfig:
        """The validated configuration that the model is built from; raises ConfigError as described above."""
        return config_from_dict(self.to_release_dict(), self._source({"name_or_path": self.name_or_path}))

    def to_release_dict(self) -> dict[str, Any]:
        """The configuration in the release's layout, without what transformers adds to every configuration."""
        common = PretrainedConfig().to_dict()
        flat = {
            key: value
            for key, value in self.to_dict().items()
            if key in _OWN_KEYS | OUTER_KEYS or (not key.startswith("_") and (key not in common or common[key] != value))
        }
        text = {key: value for key, value in flat.items() if key not in OUTER_KEYS and (key in _OWN_KEYS or key not in common)}
        outer = {key: value for key, value in flat.items() if key not in text}
        return outer | {"text_config": {"model_type": f"{self.model_type}_text"} | text}

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written as JSON: the release's layout."""
        return self.to_release_dict()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeepseekV41Config) and self.to_dict() == other.to_dict()

    @staticmethod
    def _source(keys: Mapping[str, Any]) -> str:
        return str(keys.get("name_or_path") or "") or "config"
