# SPDX-License-Identifier: Apache-2.0
"""``import nki`` works in these tests: the real package where it is installed, else the emulator."""

from . import provide_nki

provide_nki()
