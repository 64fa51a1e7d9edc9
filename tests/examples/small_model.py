# SPDX-License-Identifier: Apache-2.0
"""A configuration that is smaller still, with weights that leave nothing at its neutral value."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.train_tiny.quantise import checkpoint_tensors
from examples.train_tiny.weights import initial_weights, stored
from modeling_deepseek_v41.checkpoint.folder import fit_engram, write_files
from modeling_deepseek_v41.checkpoint.tiny_tokenizer import make_tokenizer
from modeling_deepseek_v41.checkpoint.writer import write_shards
from modeling_deepseek_v41.config import ModelConfig, config_from_dict
from modeling_deepseek_v41.engram.token_map import compress_vocabulary

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SMALLER = {
    "vocab_size": 320, "hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32, "o_lora_rank": 32,
    "n_routed_experts": 6, "engram_vocab_size": 100, "dspark_n_routed_experts": 4, "dspark_markov_rank": 32,
    "dspark_noise_token_id": 319, "sliding_window": 16, "index_topk": 12, "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
}  # fmt: skip
"""Selections are hard from a few dozen tokens on."""


@dataclasses.dataclass
class Small:
    """What a training run begins with."""

    content: dict[str, Any]
    """Of config.json."""
    config: ModelConfig
    tokenizer: Tokenizer
    token_map: Tensor

    def weights(self) -> dict[str, Tensor]:
        """Random weights, also where training begins with ones and zeros."""
        generator = torch.Generator().manual_seed(1)
        weights = initial_weights(self.config, seed=0)
        for weight in weights.values():
            weight.data += 0.3 * weight.data.std().nan_to_num(0).clamp(0.3, 1) * torch.randn(weight.shape, generator=generator)
        return weights

    def write(self, weights: dict[str, Tensor], folder: Path) -> None:
        """A checkpoint of ``weights``."""
        write_shards(checkpoint_tensors(weights, self.config, stored(self.config)), folder)
        write_files(folder, self.content, self.config, self.tokenizer)


@functools.cache
def small_model() -> Small:
    content = json.loads((EXAMPLES / "train_tiny/config.json").read_text())
    content["text_config"] |= SMALLER
    config = config_from_dict(content)
    tokenizer = make_tokenizer(config)
    fit_engram(content["text_config"], tokenizer, config)
    config = config_from_dict(content)
    return Small(content, config, tokenizer, torch.from_numpy(compress_vocabulary(tokenizer, config.vocab_size)[0]))
