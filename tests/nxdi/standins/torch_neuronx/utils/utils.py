# SPDX-License-Identifier: Apache-2.0
"""Stand-in."""

from . import get_platform_target

__all__ = ["SUPPORTED_TYPES", "get_platform_target"]
SUPPORTED_TYPES = ("trn1", "inf2", "trn2", "trn3")
