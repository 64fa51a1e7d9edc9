# SPDX-License-Identifier: Apache-2.0
"""The tiny model of the golden files in fp32, its tokenizer, and the prompts with their continuations."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.text import TextTokenizer, load_tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "data/golden/tiny_a"
LENGTHS = (1, 5, 17, 40, 100)


@pytest.fixture(scope="session")
def model() -> DeepseekV41Model:
    return load_model(GOLDEN / "ckpt", "fp32", progress=False)


@pytest.fixture(scope="session")
def tokenizer(model: DeepseekV41Model) -> TextTokenizer:
    return load_tokenizer(GOLDEN / "ckpt", model.config)


@pytest.fixture(scope="session")
def golden() -> dict[int, tuple[list[int], list[int]]]:
    stored = load_file(GOLDEN / "golden_f32.safetensors")
    return {
        length: (stored[f"p{length}.input_ids"][0].tolist(), stored[f"p{length}.generated"][0].tolist()) for length in LENGTHS
    }
