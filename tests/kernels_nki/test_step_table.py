# SPDX-License-Identifier: Apache-2.0
"""A decode step at release shapes: what docs/kernels.md says of it."""

from pathlib import Path

import pytest
from nki_emulator import real_nki

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


@pytest.mark.slow
@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_step_table():
    """The document has the table as the emulator gives it now, and VectorE is busy for less than half of the step's bounds.

    The table is written anew by ``python tests/kernels_nki/write_step_table.py``.
    """
    from step_table import Table, with_table

    table = Table()
    total, document = table.total, DOCUMENT.read_text()
    assert total.busy["vector"] < 0.5 * total.bound
    assert with_table(document, table.text()) == document
