# SPDX-License-Identifier: Apache-2.0
"""Writes the table of one decode step in docs/kernels.md anew: ``python tests/kernels_nki/write_step_table.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nki_emulator import provide_nki

if __name__ == "__main__":
    provide_nki()
    from step_table import Table, with_table

    document = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
    document.write_text(with_table(document.read_text(), Table().text()))
