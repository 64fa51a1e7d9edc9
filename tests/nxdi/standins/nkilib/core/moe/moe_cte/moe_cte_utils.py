# SPDX-License-Identifier: Apache-2.0
"""Names that NxD uses as defaults when it is imported."""

import enum
from typing import NamedTuple


class BlockShardStrategy(enum.Enum):
    """Stand-in."""

    HI_LO = 0
    PING_PONG = 1


class SkipMode(NamedTuple):
    """Stand-in."""

    skip_token: bool = False
    skip_weight: bool = False
