# SPDX-License-Identifier: Apache-2.0
"""Stand-in."""

import _absent

jit = _absent.decorator
__getattr__ = _absent.getattr_of(__name__)
