# SPDX-License-Identifier: Apache-2.0
"""Tests on NxD Inference are skipped where it is absent: here, so that the report has one line for all of them."""

import pytest
from sources import missing


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips ``item`` where what it runs on is missing."""
    absent = missing() if item.get_closest_marker("nxdi") else []
    if absent:
        pytest.skip("NxD Inference is not here: " + "; ".join(absent))
