# SPDX-License-Identifier: Apache-2.0
"""What the operations that run NKI kernels share."""

from collections.abc import Callable
from typing import Any

Launch = Callable[..., Any]
"""launch(kernel, *tensors, cores=2, **constants) runs a kernel and returns what it returns, as tensors."""

PARTITIONS, BANK = 128, 512
"""Rows per kernel call; window rows and selected rows per kernel call (kernels/nki/split.py)."""
CORES, MOST_ROWS = 2, 32
"""Of a logical core: physical ones, which share weights that divide; rows per call of fused linears (kernels/nki/slots.py)."""
