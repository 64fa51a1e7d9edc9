# SPDX-License-Identifier: Apache-2.0
"""The golden checkpoint behind the Hugging Face class, in the two arithmetics that tests compare with."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from modeling_deepseek_v41 import DeepseekV41ForCausalLM

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def folder() -> Path:
    """The golden checkpoint: 8 layers, vocabulary of 512, window of 16, at most 256 positions."""
    return DATA / "golden" / "tiny_a" / "ckpt"


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    """Token ids and logits of the release's reference in fp32 arithmetic."""
    return load_file(DATA / "golden" / "tiny_a" / "golden_f32.safetensors")


@pytest.fixture(scope="session")
def model(folder: Path) -> DeepseekV41ForCausalLM:
    """In fp32, the arithmetic of the golden."""
    return DeepseekV41ForCausalLM.from_pretrained(folder, numerics="fp32")


@pytest.fixture(scope="session")
def smooth(folder: Path) -> DeepseekV41ForCausalLM:
    """Without rounding steps: where two ways to compute differ by the order of a sum, results differ as little."""
    return DeepseekV41ForCausalLM.from_pretrained(folder, numerics="fp32_no_qdq")
