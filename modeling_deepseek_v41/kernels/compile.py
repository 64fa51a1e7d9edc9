# SPDX-License-Identifier: Apache-2.0
"""How loops over rows and weights are compiled for the CPU (numba)."""

from collections.abc import Callable
from types import FunctionType

import torch
from numba import njit

WORTH_THREADS = 1 << 16
"""Values that a call must read before it is worth waking other threads."""

exact = njit(cache=True, nogil=True, error_model="numpy")
"""Compiles a function that adds in the order that is written."""

reassociated = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})
"""Compiles a function whose sums may be reordered, which lets them use vector instructions."""


def threaded(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles ``function`` with and without threads; the result's first argument, the values it reads, chooses.

    In decode the choice must not depend on the number of rows where the two may differ in the last bit: callers give the
    size of the weights there, or 0. Quantisers and selections are exact, so theirs may. ``alone``, an attribute of the
    result, is the one for compiled callers.
    """
    single = FunctionType(function.__code__, function.__globals__)  # numba's cache tells functions apart by name, not options
    single.__qualname__ = f"{function.__qualname__}_alone"
    alone = exact(single)
    together = njit(cache=True, nogil=True, parallel=True, error_model="numpy")(function)

    def call(work: int, *args: object) -> None:
        (together if work >= WORTH_THREADS and torch.get_num_threads() > 1 else alone)(*args)

    call.alone = alone  # type: ignore[attr-defined]
    return call
