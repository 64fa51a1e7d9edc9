# SPDX-License-Identifier: Apache-2.0
"""What stands beside the shards in a checkpoint's folder: configuration, tokenizer and generation defaults."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..config import ModelConfig


def write_files(folder: Path, content: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Writes config.json (``content``, of which ``config`` is the reading), tokenizer.json, tokenizer_config.json and
    generation_config.json to ``folder``, which exists."""
    _write_json(folder / "config.json", content)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, config))
    ends = list(config.eos_token_ids)
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config.pad_token_id,
    }
    _write_json(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})


def fit_engram(text: dict[str, Any], tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Corrects the engram keys that follow from the tokenizer and the others in ``text``, the content of text_config.

    These are engram_compressed_vocab_size and engram_num_embeddings; ``config`` is the reading of the content before.
    """
    from ..engram.hashing import engram_primes
    from ..engram.token_map import compress_vocabulary

    text["engram_compressed_vocab_size"] = int(compress_vocabulary(tokenizer, config.vocab_size)[1])
    text["engram_num_embeddings"] = [sum(primes) for primes in engram_primes(config)]


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_config(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    ids = {"bos": config.bos_token_id, "eos": next(iter(config.eos_token_ids), None), "pad": config.pad_token_id}
    tokens = {f"{key}_token": tokenizer.id_to_token(token) for key, token in ids.items() if token is not None}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: token for key, token in tokens.items() if token is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
