# SPDX-License-Identifier: Apache-2.0
"""A run without the tests on NxD Inference says so in one line."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Writes the line where markers leave these tests out."""
    if "not nxdi" in config.getoption("markexpr"):
        terminalreporter.write_line("tests on NxD Inference were left out: -m nxdi runs them where it is (docs/nxdi.md)")
