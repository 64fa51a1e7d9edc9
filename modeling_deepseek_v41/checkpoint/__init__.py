# SPDX-License-Identifier: Apache-2.0
"""Reading, describing and writing checkpoints in the release's format."""

from .describe import GroupRow, summarize
from .reader import Checkpoint
from .spec import TensorSpec, expected_tensors, is_vision

__all__ = ["Checkpoint", "GroupRow", "TensorSpec", "expected_tensors", "is_vision", "summarize"]
