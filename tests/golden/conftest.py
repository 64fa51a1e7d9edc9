# SPDX-License-Identifier: Apache-2.0
"""The golden set and its checkpoint's model in each arithmetic, loaded once per process."""

import functools
import shutil
from pathlib import Path

import pytest
from driving import TINY

from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.verify import GoldenSet


@functools.cache
def _load(numerics: str) -> DeepseekV41Model:
    return load_model(TINY / "ckpt", numerics, progress=False)


@pytest.fixture
def folder() -> Path:
    """The golden checkpoint: 8 layers, vocabulary of 512, window of 16, at most 256 positions."""
    return TINY / "ckpt"


@pytest.fixture
def golden() -> GoldenSet:
    """The golden set tiny_a."""
    return GoldenSet(TINY)


@pytest.fixture
def model(numerics: str) -> DeepseekV41Model:
    """The golden checkpoint in the arithmetic that the test asks for; tests leave it as it is."""
    return _load(numerics)


@pytest.fixture
def own(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint and golden set that a test file has ``made``, the set free to be changed."""
    shutil.copytree(made[1], tmp_path / "golden")
    return made[0], tmp_path / "golden"
