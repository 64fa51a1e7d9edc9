# SPDX-License-Identifier: Apache-2.0
"""Stand-in."""

from nkilib.kernels import cascaded_max

__all__ = ["cascaded_max"]
