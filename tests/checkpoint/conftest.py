# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that a test may damage."""

import shutil
from pathlib import Path

import pytest
from damage import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that a test may damage."""
    copy = tmp_path / "ckpt"
    shutil.copytree(TINY, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    return copy
