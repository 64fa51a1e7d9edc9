# SPDX-License-Identifier: Apache-2.0
"""The trace: counts, busy times, memory, and the list schedule."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from . import costs, real_nki, run

pytestmark = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")


def copies(dependent):
    """Load two tiles and copy one, or both in a chain."""

    def kernel(x):
        a, b = nl.load(x), nl.load(x)
        c, d = nl.ndarray(x.shape, nl.float32), nl.ndarray(x.shape, nl.float32)
        nisa.tensor_copy(c, a)
        nisa.tensor_copy(d, c if dependent else b)

    return kernel


def test_counts_bytes_and_busy():
    x = np.zeros((128, 1024), np.float32)
    trace = run(copies(True), x).trace
    assert trace.counts() == {"dma_copy": 2, "tensor_copy": 2}
    assert trace.dma_bytes() == 2 * x.nbytes
    assert trace.busy()["vector"] == pytest.approx(2 * 1024 / 960)
    assert trace.busy()["dma"] == pytest.approx(2 * (x.nbytes + 128 * costs.DMA_RUN_OVERHEAD) / costs.DMA_BYTES_PER_US)


def test_a_chain_waits_for_each_result():
    x = np.zeros((128, 16), np.float32)
    chain, free = run(copies(True), x).trace, run(copies(False), x).trace
    plan = chain.schedule()
    first, second = (one.index for one in chain.instructions if one.name == "tensor_copy")
    assert plan.start[second] == plan.end[first]
    assert plan.end[first] - plan.start[first] == pytest.approx((16 + costs.DEPENDENT_CYCLES) / 960)
    loads = [one.index for one in free.instructions if one.name == "dma_copy"]
    third, fourth = (one.index for one in free.instructions if one.name == "tensor_copy")
    assert third not in free.instructions[fourth].depends
    assert plan.end[loads[1]] - plan.end[loads[0]] < costs.DMA_FIXED_US  # latencies of DMAs overlap
    assert chain.critical_path_us() == plan.makespan


def test_reading_and_overwriting_are_ordered():
    def kernel(x):
        a, b = nl.load(x), nl.ndarray(x.shape, nl.float32)
        nisa.activation(b, nl.copy, a)
        nisa.memset(a, 0)
        nisa.memset(b[:, 0:8], 0)

    trace = run(kernel, np.zeros((128, 512), np.float32)).trace
    plan = trace.schedule()
    activation, after_read, after_write = trace.instructions[1:]
    assert activation.index in after_read.depends  # write after read
    assert activation.index in after_write.depends  # write after write
    assert plan.start[after_read.index] >= plan.end[activation.index]


def test_disjoint_regions_do_not_wait():
    def kernel():
        a = nl.ndarray((128, 64), nl.float32)
        nisa.memset(a[:, 0:32], 0)
        nisa.memset(a[:, 32:64], 0, engine=nisa.engine.gpsimd)

    assert run(kernel).trace.instructions[1].depends == ()


def test_memory_limits_prefetch():
    """Tiles of 90 KiB per partition: two fit, so the third load waits for the first tile's last use."""

    def kernel(x):
        for _ in range(3):
            a = nl.ndarray((128, 23040), nl.float32)
            nisa.dma_copy(a, x)
            b = nl.ndarray((128, 1), nl.float32)
            nisa.tensor_reduce(b, nl.add, a, axis=1)

    trace = run(kernel, np.zeros((128, 23040), np.float32)).trace
    plan = trace.schedule()
    loads = [one.index for one in trace.instructions if one.name == "dma_copy"]
    reduces = [one.index for one in trace.instructions if one.name == "tensor_reduce"]
    assert plan.start[loads[1]] < plan.end[reduces[0]]
    assert plan.start[loads[2]] >= plan.end[reduces[0]]
    assert trace.peak() == {"sbuf": 90 * 1024 + 4, "psum": 0}


def test_a_loop_reuses_its_tiles():
    """Iterations of a dynamic loop share memory, so a load waits for the last use in the iteration before."""

    def kernel(x):
        def body(i):
            a = nl.ndarray((128, 512), nl.float32)
            nisa.dma_copy(a, x)
            nisa.tensor_scalar(a, a, nl.multiply, 2.0)

        nl.fori_loop(0, 3, body)

    trace = run(kernel, np.zeros((128, 512), np.float32)).trace
    loads = [one for one in trace.instructions if one.name == "dma_copy"]
    uses = [one for one in trace.instructions if one.name == "tensor_scalar"]
    assert uses[0].index in loads[1].depends and uses[1].index in loads[2].depends
    assert trace.peak()["sbuf"] == 2048


def test_accumulating_matmuls_stream():
    def kernel():
        sums = nl.ndarray((128, 8), nl.float32, buffer=nl.psum)
        a, b = nl.zeros((128, 128), nl.bfloat16), nl.zeros((128, 8), nl.bfloat16)
        for k in range(10):
            nisa.nc_matmul(sums, a, b, accumulate=k > 0)

    trace = run(kernel).trace
    plan = trace.schedule()
    matmuls = [one.index for one in trace.instructions if one.name == "nc_matmul"]
    assert plan.start[matmuls[-1]] - plan.start[matmuls[0]] == pytest.approx(9 * costs.ISSUE_CYCLES / 2400)


def test_a_store_that_waits_does_not_hold_up_loads():
    def kernel(x):
        out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
        a = nl.load(x)
        for _ in range(20):
            nisa.tensor_scalar(a, a, nl.multiply, 2.0)
        nisa.dma_copy(out, a)
        nl.load(x)

    trace = run(kernel, np.zeros((128, 512), np.float32)).trace
    plan = trace.schedule()
    _, store, load = (one.index for one in trace.instructions if one.name == "dma_copy")
    assert plan.end[load] < plan.start[store]


def test_columns_of_a_tensor_in_hbm_are_apart():
    def kernel():
        out = nl.ndarray((8, 64), nl.float32, buffer=nl.private_hbm)
        for column in range(4):
            nisa.dma_copy(out[:, 16 * column : 16 * column + 16], nl.zeros((8, 16), nl.float32))

    trace = run(kernel).trace
    stores = {one.index for one in trace.instructions if one.name == "dma_copy"}
    assert not any(stores & set(trace.instructions[index].depends) for index in stores)


def test_a_barrier_joins_the_cores():
    def kernel():
        both = nl.ndarray((2, 512), nl.float32, buffer=nl.shared_hbm)
        mine = nl.zeros((1, 512), nl.float32)
        if nl.program_id() == 1:
            for _ in range(20):
                nisa.tensor_scalar(mine, mine, nl.add, 1.0)
        nisa.dma_copy(both[nl.program_id()], mine)
        nisa.core_barrier(both, (0, 1))
        whole = nl.ndarray((2, 512), nl.float32)
        nisa.dma_copy(whole, both)

    trace = run(kernel, cores=2).trace
    plan = trace.schedule()
    slow = next(one.index for one in trace.instructions if one.core == 1 and one.name == "dma_copy")
    late = [one.index for one in trace.instructions if one.core == 0 and one.name == "dma_copy"][1]
    assert plan.start[late] >= plan.end[slow] + costs.BARRIER_US
    assert trace.busy(1)["vector"] > trace.busy(0)["vector"]
    assert trace.count("core_barrier") == 2


def test_table_names_engines_and_lines():
    table = run(copies(True), np.zeros((128, 64), np.float32)).trace.table()
    for text in ("vector", "dma", "critical path", "peak per partition", "test_trace.py"):
        assert text in table
