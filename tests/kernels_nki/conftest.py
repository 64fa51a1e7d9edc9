# SPDX-License-Identifier: Apache-2.0
"""Tests of NKI kernels: ``nki_emulator`` can be imported, and ``import nki`` works with the real package or the emulator."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nki_emulator import provide_nki

provide_nki()
