# SPDX-License-Identifier: Apache-2.0
"""A decode step at release shapes: what docs/kernels.md says of it."""

from pathlib import Path

import pytest
from nki_emulator import real_nki

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


@pytest.mark.slow
@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_step_table():
    """The document has the table as the emulator gives it now. VectorE is busy for less than half of the step's bounds. All
    linears together take at most 1.3 times the time of the bytes they read, and so does each that reads 12 MB or more.

    The table is written anew by ``python tests/kernels_nki/write_step_table.py``.
    """
    from step_table import HBM_RATE, LINEARS, Table, sums, with_table

    table = Table()
    total, document = table.total, DOCUMENT.read_text()
    assert total.busy["vector"] < 0.5 * total.bound
    linears = {key: times for key, times in table.everything.items() if key[0] in LINEARS}
    together = sums(linears, table.costs)
    assert together.latency <= 1.3 * together.nbytes / HBM_RATE
    assert together.latency == pytest.approx(1.24 * together.nbytes / HBM_RATE, rel=0.005)
    for cost in (table.costs[key] for key in linears):
        assert cost.nbytes < 12e6 or round(cost.latency * HBM_RATE / cost.nbytes, 2) <= 1.3
    assert with_table(document, table.text()) == document
