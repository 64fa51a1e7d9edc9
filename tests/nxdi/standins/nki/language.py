# SPDX-License-Identifier: Apache-2.0
"""Stand-in."""

import _absent

__getattr__ = _absent.getattr_of(__name__)


class NKIObject:
    """What kernels derive classes of their own from."""
