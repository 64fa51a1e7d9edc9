# SPDX-License-Identifier: Apache-2.0
"""Proof of the numbers: a checkpoint's model against the golden outputs of the release's reference."""

from .check import check_mode, verify
from .golden_error import GoldenError
from .golden_set import MODES, GoldenSet
from .report import ModeResult, Report

__all__ = ["MODES", "GoldenError", "GoldenSet", "ModeResult", "Report", "check_mode", "verify"]
