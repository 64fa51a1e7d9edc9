# SPDX-License-Identifier: Apache-2.0
"""What a run on a device would take, found by running the model's own code on tensors without data."""

from .check import Plan, Settings, make_plan

__all__ = ["Plan", "Settings", "make_plan"]
