# SPDX-License-Identifier: Apache-2.0
"""The smaller configuration for the tests of the training example."""

import copy

import pytest
from small_model import Small, small_model


@pytest.fixture
def small() -> Small:
    """What a training run begins with; tests may change their copy."""
    return copy.deepcopy(small_model())
