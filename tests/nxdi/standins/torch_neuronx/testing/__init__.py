# SPDX-License-Identifier: Apache-2.0
"""Stand-in."""

import torch

from .validation import AllCloseSummary, custom_allclose, logit_validation, neuron_allclose

__all__ = ["AllCloseSummary", "assert_close", "custom_allclose", "logit_validation", "neuron_allclose"]


def assert_close(expected, actual, **kwargs):
    """As torch.testing's."""
    torch.testing.assert_close(actual, expected, **kwargs)
