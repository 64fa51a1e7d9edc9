# SPDX-License-Identifier: Apache-2.0
"""Running a few instructions by themselves."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from . import run

rng = np.random.default_rng(0)


def on_device(body, *arrays, shape, dtype="float32"):
    """Load arrays to SBUF, let ``body(dst, *tiles)`` write a tile, and return it."""

    @nki.jit
    def kernel(*tensors):
        output = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
        tiles = []
        for tensor in tensors:
            tile = nl.ndarray(tensor.shape, tensor.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=tensor)
            tiles.append(tile)
        dst = nl.ndarray(shape, dtype, buffer=nl.sbuf)
        body(dst, *tiles)
        nisa.dma_copy(dst=output, src=dst)
        return output

    return run(kernel, *arrays).outputs


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)
