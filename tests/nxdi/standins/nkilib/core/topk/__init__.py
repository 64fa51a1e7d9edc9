# SPDX-License-Identifier: Apache-2.0
"""Stand-in."""

from nkilib.kernels import topk

__all__ = ["topk"]
