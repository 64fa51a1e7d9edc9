# SPDX-License-Identifier: Apache-2.0
"""Stand-in."""

from nkilib.kernels import cumsum

__all__ = ["cumsum"]
