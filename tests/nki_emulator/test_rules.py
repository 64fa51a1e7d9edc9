# SPDX-License-Identifier: Apache-2.0
"""Each rule fires: a small kernel that breaks it, and for the harder ones the nearest kernel that does not."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from . import RULES, RuleError, real_nki, run

pytestmark = pytest.mark.skipif(real_nki(), reason="the emulator's own rules")

BROKEN: list[tuple[str, object, int]] = []
KEPT: list[object] = []


def breaks(rule, cores=1):
    """Mark a kernel that breaks ``rule``."""

    def mark(kernel):
        BROKEN.append((rule, kernel, cores))
        return kernel

    return mark


def keeps(kernel):
    """Mark a kernel that breaks nothing."""
    KEPT.append(kernel)
    return kernel


def tile(p, f, dtype="float32", buffer=nl.sbuf, value=0):
    """An initialised tile."""
    made = nl.ndarray((p, f), dtype, buffer=buffer)
    nisa.memset(made, value)
    return made


def psum(p, f):
    """A PSUM tile that nothing has written."""
    return nl.ndarray((p, f), nl.float32, buffer=nl.psum)


def hbm(*shape, dtype="float32"):
    """An uninitialised HBM tensor."""
    return nl.ndarray(shape, dtype, buffer=nl.private_hbm)


def index(*values):
    """int32 [n, 1] in SBUF."""
    made = nl.ndarray((len(values), 1), nl.int32)
    nisa.dma_copy(made, nl.shared_constant(np.int32(values)[:, None]))
    return made


# tiles
breaks("partitions")(lambda: nl.ndarray((129, 4), nl.float32))
breaks("two-dimensions")(lambda: nl.ndarray((128,), nl.float32))
breaks("start-partition")(lambda: nisa.memset(nl.ndarray((128, 4), nl.float32)[16:32], 0))
breaks("start-partition")(lambda: nisa.memset(nl.ndarray((128, 4), nl.float32)[32:96], 0))
keeps(lambda: nisa.memset(nl.ndarray((128, 4), nl.float32)[96:128], 0))
keeps(lambda: nisa.memset(nl.ndarray((128, 4), nl.float32)[64:128], 0))
breaks("partition-step")(lambda: nisa.memset(nl.ndarray((128, 4), nl.float32)[::2], 0))
breaks("free-dimensions")(lambda: nisa.memset(nl.ndarray((8, 4, 4, 4, 4), nl.float32)[:, ::2, ::2, ::2, ::2], 0))
keeps(lambda: nisa.memset(nl.ndarray((8, 4, 4, 4, 4), nl.float32), 0))
breaks("stride")(lambda: nisa.memset(nl.ndarray((8, 2, 40000), nl.int8)[:, :, 0:8], 0))
keeps(lambda: nisa.memset(nl.ndarray((8, 2, 40000), nl.int8), 0))
breaks("bounds")(lambda: hbm(4, 4).ap([[4, 4], [1, 5]]))
breaks("ap-offset")(lambda: tile(4, 8)[:, 4:].ap([[8, 4], [1, 2]], offset=2))
breaks("view")(lambda: tile(4, 8).reshape((8, 4)))
breaks("index")(lambda: tile(4, 8)[0, 0, 0])
breaks("uninitialised")(lambda: nisa.tensor_copy(tile(4, 8), nl.ndarray((4, 8), nl.float32)))
breaks("uninitialised")(lambda: nisa.dma_copy(tile(4, 8), hbm(4, 8)))
breaks("sbuf-capacity")(lambda: nl.ndarray((128, 60000), nl.float32))
breaks("psum-capacity")(lambda: psum(128, 4097))


@breaks("sbuf-capacity")
def live_tiles_exceed_sbuf():
    tiles = [tile(128, 30000) for _ in range(2)]
    nisa.tensor_copy(tiles[0], tiles[1])


@keeps
def tiles_one_after_the_other_fit():
    for _ in range(3):
        tile(128, 30000)


@breaks("psum-capacity")
def live_tiles_exceed_psum():
    tiles = [tile(128, 8, buffer=nl.psum) for _ in range(9)]
    for one in tiles:
        nisa.tensor_copy(tile(128, 8), one)


# dtypes
breaks("dtype")(lambda: nl.ndarray((4, 4), "float64"))
breaks("dtype-trn2")(lambda: nisa.memset(nl.ndarray((4, 4), nl.float8_e4m3fn), 0))
breaks("dtype-operand")(lambda: nisa.tensor_scalar(tile(4, 4), tile(4, 4), nl.add, tile(4, 1, "bfloat16")))
breaks("dtype-operand")(lambda: nisa.nc_transpose(psum(4, 8), tile(8, 4, "bfloat16")))
breaks("bitvec")(lambda: nisa.tensor_scalar(tile(4, 4), tile(4, 4), nl.bitwise_and, 1))
breaks("bitvec")(
    lambda: nisa.tensor_scalar(tile(4, 4, "int32"), tile(4, 4, "int32"), nl.bitwise_and, 1, op1=nl.add, operand1=1)
)
breaks("operator")(
    lambda: nisa.scalar_tensor_tensor(*[tile(4, 4, "int32")] * 2, nl.bitwise_and, 1, nl.add, tile(4, 4, "int32"))
)

# operands
breaks("tile")(lambda: nisa.tensor_copy(tile(4, 4), 3.0))
breaks("buffer")(lambda: nisa.tensor_copy(tile(4, 4), hbm(4, 4)))
breaks("buffer")(lambda: nisa.nc_matmul(psum(4, 4), tile(4, 4, buffer=nl.psum), tile(4, 4)))
breaks("buffer")(lambda: nisa.nc_matmul(tile(4, 4), tile(4, 4), tile(4, 4)))
breaks("gpsimd-psum")(lambda: nisa.tensor_copy(tile(4, 4), tile(4, 4, buffer=nl.psum), engine=nisa.engine.gpsimd))
breaks("both-psum")(lambda: nisa.tensor_tensor(tile(4, 4), *[tile(4, 4, buffer=nl.psum)] * 2, nl.add))
breaks("shape")(lambda: nisa.tensor_copy(tile(4, 4), tile(4, 5)))
breaks("vector-operand")(lambda: nisa.tensor_scalar(tile(4, 4), tile(4, 4), nl.add, tile(4, 2)))
breaks("engine")(lambda: nisa.tensor_scalar(*[tile(4, 4)] * 2, nl.maximum, 0.0, engine=nisa.engine.scalar))
breaks("engine")(lambda: nisa.tensor_tensor(*[tile(4, 4)] * 3, nl.add, engine=nisa.engine.scalar))
breaks("operator")(lambda: nisa.tensor_scalar(*[tile(4, 4)] * 2, nl.square, 0.0))
breaks("operator")(lambda: nisa.tensor_tensor(*[tile(4, 4)] * 3, nl.abs_max))
breaks("operator")(lambda: nisa.activation(*[tile(4, 4)][:1], nl.add, tile(4, 4)))
breaks("argument")(lambda: nisa.tensor_reduce(tile(4, 4), nl.add, tile(4, 4), axis=0))
breaks("argument")(lambda: nisa.max8(tile(4, 8), tile(4, 7)))
breaks("argument")(lambda: nisa.iota(tile(4, 8, "int32"), [[1, 7]]))
breaks("activation-range")(lambda: nisa.activation(tile(4, 4), nl.rsqrt, tile(4, 4)))
keeps(lambda: nisa.activation(tile(4, 4), nl.rsqrt, tile(4, 4), bias=1e-20))
breaks("indirect")(lambda: hbm(4, 4).vector_select(0, tile(4, 1)))
breaks("indirect-bounds")(
    lambda: nisa.dma_copy(tile(2, 4), nl.shared_constant(np.ones((3, 4), np.float32)).vector_select(0, index(0, 3)))
)
breaks("indirect-bounds")(lambda: nisa.nc_n_gather(tile(4, 4), tile(4, 4), tile(4, 4, "uint32", value=4)))
breaks("scatter-unique")(lambda: nisa.dma_copy(hbm(4, 4).vector_select(0, index(1, 1)), tile(2, 4)))
breaks("reduce-registers")(lambda: nisa.activation(tile(4, 4), nl.exp, tile(4, 4), reduce_op=nl.add, reduce_res=tile(4, 1)))
breaks("reduce-registers")(
    lambda: nisa.activation(tile(4, 4), nl.exp, tile(4, 4), reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reduce)
)

# DMA
breaks("dma-psum")(lambda: nisa.dma_copy(hbm(4, 4), tile(4, 4, buffer=nl.psum)))
breaks("dge-mode")(lambda: nisa.dma_copy(hbm(4, 4).vector_select(0, index(0, 1)), tile(2, 4), dge_mode=nisa.dge_mode.hwdge))

# tensor engine
breaks("matmul-tile")(lambda: nisa.nc_matmul(psum(4, 513), tile(4, 4), tile(4, 513)))
breaks("matmul-tile")(lambda: nisa.nc_matmul(psum(128, 4), tile(4, 129), tile(4, 4)))
breaks("matmul-dtype")(lambda: nisa.nc_matmul(psum(4, 4), tile(4, 4, "bfloat16"), tile(4, 4)))
breaks("matmul-dtype")(lambda: nisa.nc_matmul(nl.ndarray((4, 4), nl.bfloat16, buffer=nl.psum), *[tile(4, 4, "bfloat16")] * 2))
breaks("matmul-rows")(lambda: nisa.nc_matmul(psum(4, 4), tile(64, 4)[32:64], tile(64, 4)[0:32]))
breaks("psum-bank")(lambda: nisa.nc_matmul(psum(4, 1024)[:, 400:600], tile(4, 4), tile(4, 200)))
keeps(lambda: nisa.nc_matmul(psum(4, 1024)[:, 512:1024], tile(4, 4), tile(4, 512)))
breaks("psum-group")(lambda: nisa.nc_matmul(psum(4, 4), tile(4, 4), tile(4, 4), accumulate=True))
breaks("psum-group")(lambda: nisa.nc_matmul(tile(4, 4, buffer=nl.psum), tile(4, 4), tile(4, 4), accumulate=True))
breaks("psum-group")(lambda: nisa.nc_matmul(tile(4, 4, buffer=nl.psum), tile(4, 4), tile(4, 4)))
keeps(lambda: nisa.nc_matmul(tile(4, 4, buffer=nl.psum), tile(4, 4), tile(4, 4), accumulate=False))
breaks("double-row")(lambda: nisa.nc_matmul(psum(2, 2), tile(4, 4, "bfloat16"), tile(4, 4, "bfloat16"), perf_mode="double_row"))
breaks("transpose-tile")(lambda: nisa.nc_transpose(tile(40, 32), tile(32, 40), engine=nisa.engine.vector))
breaks("argument")(lambda: nisa.nc_matmul(psum(4, 4), tile(4, 4), tile(4, 4, value=1), is_transpose=True))


@breaks("psum-group")
def copied_psum_counts_as_uninitialised():
    sums = psum(4, 4)
    nisa.nc_matmul(sums, tile(4, 4), tile(4, 4), accumulate=False)
    nisa.tensor_copy(sums, tile(4, 4))
    nisa.nc_matmul(sums, tile(4, 4), tile(4, 4), accumulate=True)


# loops and registers
@breaks("register")
def register_in_python():
    register = nisa.register_alloc(3)
    if register:
        tile(4, 4)


breaks("register")(lambda: range(nisa.register_alloc(3)))
breaks("register")(lambda: nl.fori_loop(0, 3, lambda i: tile(4, 4)[:, i + 1] and None))
breaks("index")(lambda: nl.fori_loop(0, 3, lambda i: tile(4, 4)[:, i] and None))
breaks("loop-variable")(lambda: nl.fori_loop(0, 3, lambda i: nisa.register_move(i, 0)))
breaks("loop-variable")(lambda: nl.fori_loop(0, 3, lambda i: 1))
breaks("loop-body")(lambda: nl.dynamic_range(3))


@breaks("loop-scope")
def tile_escapes():
    made = []
    nl.fori_loop(0, 1, lambda i: made.append(tile(4, 4)))
    nisa.tensor_copy(tile(4, 4), made[0])


@breaks("loop-body")
def body_changes():
    rounds = []

    def body(i):
        rounds.append(0)
        for _ in rounds:
            tile(4, 4)

    nl.fori_loop(0, 2, body)


@breaks("loop-accumulate")
def inferred_accumulation_across_iterations():
    sums = psum(4, 4)
    nl.fori_loop(0, 2, lambda i: nisa.nc_matmul(sums, tile(4, 4), tile(4, 4)))


@breaks("no-reorder")
def loop_in_no_reorder():
    with nl.no_reorder():
        nl.fori_loop(0, 2, lambda i: None)


# two cores
def shared(*shape):
    """Shared HBM."""
    return nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm)


@breaks("race", cores=2)
def read_without_barrier():
    both = shared(2, 4)
    if nl.program_id() == 0:
        nisa.dma_copy(both, tile(2, 4))
    else:
        nisa.dma_copy(tile(2, 4), both)


@breaks("uninitialised", cores=2)
def read_before_the_other_core_has_written():
    both = shared(2, 4)
    nisa.dma_copy(both[nl.program_id()], tile(1, 4))
    nisa.dma_copy(tile(2, 4), both)


@breaks("race", cores=2)
def barrier_on_another_tensor():
    both, other = shared(2, 4), shared(2, 4)
    nisa.dma_copy(both[nl.program_id()], tile(1, 4))
    nisa.core_barrier(other, (0, 1))
    nisa.dma_copy(tile(2, 4), both)


def barrier_between():
    both = shared(2, 4)
    nisa.dma_copy(both[nl.program_id()], tile(1, 4))
    nisa.core_barrier(both, (0, 1))
    nisa.dma_copy(tile(2, 4), both)


@breaks("race", cores=2)
def both_write_one_row():
    nisa.dma_copy(shared(1, 4), tile(1, 4))


@breaks("race", cores=2)
def overwritten_while_read():
    both = shared(2, 4)
    nisa.dma_copy(both[nl.program_id()], tile(1, 4))
    nisa.core_barrier(both, (0, 1))
    nisa.dma_copy(tile(2, 4), both)
    nisa.dma_copy(both[nl.program_id()], tile(1, 4))


@breaks("barrier", cores=2)
def one_core_returns():
    data = shared(2, 4)
    if nl.program_id() == 0:
        nisa.core_barrier(data, (0, 1))


@breaks("barrier", cores=2)
def different_barriers():
    first, second = shared(2, 4), shared(2, 4)
    nisa.core_barrier(first if nl.program_id() == 0 else second, (0, 1))


breaks("trip-counts", cores=2)(lambda: nl.fori_loop(0, 1 + nl.program_id(), lambda i: None))
breaks("shared-allocation", cores=2)(lambda: shared(1 + nl.program_id(), 4))
breaks("output", cores=2)(lambda: hbm(2, 2))
breaks("output")(lambda: tile(2, 2))
breaks("unsupported")(lambda: nl.ndarray((4, 4), nl.float32, address=(0, 0)))


@pytest.mark.parametrize(("rule", "kernel", "cores"), BROKEN, ids=[f"{i}-{rule}" for i, (rule, _, _) in enumerate(BROKEN)])
def test_broken(rule, kernel, cores):
    with pytest.raises(RuleError) as error:
        run(kernel, cores=cores)
    assert error.value.rule == rule, str(error.value)
    assert RULES[rule].source in str(error.value)


@pytest.mark.parametrize("kernel", KEPT)
def test_kept(kernel):
    run(lambda: kernel() and None)


def test_a_barrier_orders_the_cores():
    run(barrier_between, cores=2)


def test_every_rule_is_tested():
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def test_message_names_line_instruction_operand_and_rule():
    def kernel():
        nisa.tensor_copy(dst=tile(4, 4), src=tile(4, 5))

    with pytest.raises(RuleError) as error:
        run(kernel)
    line = kernel.__code__.co_firstlineno + 1
    assert str(error.value).splitlines()[0] == (
        f"{__file__}:{line}: tensor_copy: src: tensor[4, 5] float32 @ sbuf against dst tensor[4, 4] float32 @ sbuf"
    )
