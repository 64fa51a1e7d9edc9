# SPDX-License-Identifier: Apache-2.0
"""What instructions that move data and choose by index do."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from . import run
from .on_device import normal, on_device, rng


def test_gather_inside_sbuf():
    x, index = normal(128, 64), rng.integers(0, 64, (128, 10)).astype(np.uint32)
    out = on_device(lambda dst, a, i: nisa.nc_n_gather(dst, a, i), x, index, shape=(128, 10))
    np.testing.assert_array_equal(out, np.take_along_axis(x, index.astype(np.int64), 1))


def test_gather_and_scatter_rows():
    """The examples of dma_copy's docstring, and a skipped index leaving dst as it was."""

    @nki.jit
    def kernel(data, indices, output):
        p, f = indices.shape[0], data.shape[1]
        index = nl.load(indices)
        tile = nl.ndarray((p, f), dtype=data.dtype, buffer=nl.sbuf)
        nisa.memset(tile, 5.0)
        nisa.dma_copy(dst=tile, src=data.ap([[f, p], [1, f]], vector_offset=index), oob_mode=nisa.oob_mode.skip)
        nisa.dma_copy(dst=output.vector_select(0, index), src=tile, oob_mode=nisa.oob_mode.skip)
        result = nl.ndarray((p, f), dtype=data.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result, src=tile)
        return result

    data, indices = normal(50, 16), np.int32([[3], [49], [-1], [0], [50]])
    output = np.zeros((50, 16), np.float32)
    gathered = run(kernel, data, indices, output).outputs
    np.testing.assert_array_equal(gathered, [data[3], data[49], np.full(16, 5), data[0], np.full(16, 5)])
    np.testing.assert_array_equal(output[[3, 49, 0]], data[[3, 49, 0]])
    assert not output[[1, 2, 48]].any()


def test_dynamic_select():
    """A batch chosen by a value in SBUF."""

    @nki.jit
    def kernel(data):
        index = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        nisa.memset(index, value=3)
        result = nl.ndarray(data.shape[1:], data.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(src=data.select(0, index), dst=result[...])
        return result

    x = normal(4, 16, 8)
    np.testing.assert_array_equal(run(kernel, x).outputs, x[3])


def test_scalar_offsets_skip_or_fail():
    """An index outside leaves dst untouched with oob_mode.skip."""

    @nki.jit
    def kernel(data, index):
        at = nisa.register_alloc()
        nisa.register_load(at, index)
        tile = nl.full((1, 8), 7.0, nl.float32)
        nisa.dma_copy(dst=tile, src=data.ap([[8, 1], [1, 8]], scalar_offset=at), oob_mode=nisa.oob_mode.skip)
        out = nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    x = normal(5, 8)
    np.testing.assert_array_equal(run(kernel, x, np.int32([[4]])).outputs, x[4:5])
    assert (run(kernel, x, np.int32([[5]])).outputs == 7).all()
    assert (run(kernel, x, np.int32([[-1]])).outputs == 7).all()


def test_dynamic_columns_in_sbuf():
    """A register as offset on a free dimension, for reading and for writing."""

    def body(dst, x):
        nisa.memset(dst, 0.0)

        def move(i):
            nisa.tensor_copy(dst=dst.ap([[6, 4], [1, 1]], scalar_offset=i, indirect_dim=1), src=x.select(1, i))

        nl.fori_loop(1, 5, move, step=2)

    x = normal(4, 6)
    expected = np.zeros((4, 6), np.float32)
    expected[:, [1, 3]] = x[:, [1, 3]]
    np.testing.assert_array_equal(on_device(body, x, shape=(4, 6)), expected)


def test_registers_store():
    def body(dst):
        register = nisa.register_alloc(41)
        other = nisa.register_alloc()
        nisa.register_move(other, register)
        nisa.register_store(dst, other)
        nisa.tensor_scalar(dst, dst, nl.add, 1.0)

    assert on_device(body, shape=(1, 1), dtype="int32").tolist() == [[42]]
