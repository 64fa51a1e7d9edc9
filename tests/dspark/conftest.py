# SPDX-License-Identifier: Apache-2.0
"""The golden checkpoint's model with its drafter in each arithmetic, loaded once per process."""

import functools
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a"


@functools.cache
def _load(numerics: str, kernels: str) -> DeepseekV41Model:
    return load_model(TINY / "ckpt", numerics, kernels=kernels, progress=False, drafter=True)


@functools.cache
def _golden(mode: str) -> dict[str, Tensor]:
    return load_file(TINY / f"golden_{mode}.safetensors")


@pytest.fixture
def folder() -> Path:
    """The golden checkpoint: 8 layers, 3 drafter stages, vocabulary of 512, window of 16, blocks of 5."""
    return TINY / "ckpt"


@pytest.fixture
def kernels() -> str:
    """Which operations a test runs on where it does not say."""
    return "auto"


@pytest.fixture
def model(numerics: str, kernels: str) -> DeepseekV41Model:
    """The golden checkpoint in the arithmetic that the test asks for; tests leave it as it is."""
    return _load(numerics, kernels)


@pytest.fixture
def golden() -> dict[str, dict[str, Tensor]]:
    """The recorded tensors by mode: f32 and ref."""
    return {mode: _golden(mode) for mode in ("f32", "ref")}


@pytest.fixture
def prompts(golden: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    """The golden prompts, of 1, 5, 17, 40 and 100 tokens."""
    return [golden["f32"][f"p{length}.input_ids"][0] for length in (1, 5, 17, 40, 100)]
