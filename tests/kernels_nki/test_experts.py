# SPDX-License-Identifier: Apache-2.0
"""The experts kernels against their PyTorch reference: results, refusals, instructions and predicted times."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from nki_emulator import Result, lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41.errors import CheckpointError
from modeling_deepseek_v41.experts import as_bank, expert_by_expert
from modeling_deepseek_v41.fp8_exact import ExactRows, decode_codes, decode_rows
from modeling_deepseek_v41.kernels.dispatch import TORCH
from modeling_deepseek_v41.kernels.nki import (
    experts,
    experts_hidden,
    experts_layout,
    experts_plan,
    experts_reference,
    experts_stream,
    experts_tiles,
)
from modeling_deepseek_v41.numerics import Arithmetic

LIMIT = 10.0
BOUND_US = 3 * 5120 * 2304 / 2 / 362_500
"""Half an expert's bytes, in fp8, at a core's share of the memory's bandwidth: 48.8 us."""
NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
CORES = pytest.mark.parametrize("cores", [1, 2])
FORMS = pytest.mark.parametrize("kernel", [experts.local_experts, experts.active_experts], ids=["static", "active"])


@dataclasses.dataclass
class Case:
    """Random experts, rows, and routing weights for ``active`` experts; every active expert is chosen by some row.

    Values are small multiples of powers of two, so that the products of w1 and w3 are exact in fp32 in any order: no bf16
    rounding falls another way in the kernel than in the reference; nor does one of h. ``alike``: all experts are the same.
    """

    experts: int
    hidden: int
    inter: int
    rows: int
    active: tuple[int, ...]
    alike: bool = False

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.hidden + self.inter + self.rows)
        self.weights = [self._expert(draw) for _ in range(1 if self.alike else self.experts)]
        self.weights *= self.experts if self.alike else 1
        self.x = torch.randint(-8, 9, (self.rows, self.hidden), generator=draw) * 2.0**-4
        self.routing = torch.zeros(self.experts, self.rows)
        for expert in self.active:
            chosen = torch.rand(self.rows, generator=draw) < 0.7
            chosen[expert % self.rows] = True
            self.routing[expert] = self._clear_weights(expert, draw) * chosen

    def _clear_weights(self, expert: int, draw: torch.Generator) -> Tensor:
        """[rows] routing weights with which no value of h is so near to the middle of two bf16 values that exp decides."""
        w1, w3, _ = (decode_rows(part.codes, part.scale) for part in self.weights[expert])
        gate, up = ((self.x @ weight.T).bfloat16().double() for weight in (w1, w3))
        h = gate.clamp_max(LIMIT).mul(gate.clamp_max(LIMIT).sigmoid()).mul(up.clamp(-LIMIT, LIMIT))
        weights = torch.rand(self.rows, generator=draw)
        while True:
            low, high = (h * weights[:, None].double() * (1 + side * 2.0**-22) for side in (-1, 1))
            unclear = (low.float().bfloat16() != high.float().bfloat16()).any(1)
            if not unclear.any():
                return weights
            weights[unclear] = torch.rand(int(unclear.sum()), generator=draw)

    def _expert(self, draw: torch.Generator) -> tuple[ExactRows, ...]:
        return tuple(
            self._rows(n, k, draw) for n, k in ((self.inter, self.hidden), (self.inter, self.hidden), (self.hidden, self.inter))
        )

    @staticmethod
    def _rows(n: int, k: int, draw: torch.Generator) -> ExactRows:
        """fp4's values, 1 and 1.5 times 2^-1 to 2^2 and both signs, times a power of two per row."""
        kind = torch.randint(16, (n, k), generator=draw, dtype=torch.uint8)
        codes = (kind & 8) << 4 | (6 + ((kind >> 1) & 3)) << 3 | (kind & 1) << 2
        base = torch.randint(-6, -3, (n,), generator=draw, dtype=torch.int16)
        return ExactRows(codes, base, torch.ones(n, dtype=torch.bool))

    def expected(self, **options: bool) -> Tensor:
        return experts_reference.local_experts(self.x, self.routing, self.weights, LIMIT, **options)

    def run(self, kernel: object, cores: int, **options: bool) -> Result:
        packed = [experts_layout.pack(*one, cores) for one in (self.weights[:1] if self.alike else self.weights)]
        bank = experts_layout.stack(packed * (self.experts if self.alike else 1))
        w13, w2 = (tensor.numpy().view(ml_dtypes.float8_e4m3) for tensor in bank)
        x = self.x.numpy().astype(ml_dtypes.bfloat16)
        return run(kernel, x, self.routing.numpy(), w13, w2, limit=LIMIT, cores=cores, **options)

    def check(self, kernel: object, cores: int, **options: bool) -> Result:
        result, expected = self.run(kernel, cores, **options), self.expected(**options).numpy()
        error = np.abs(result.outputs - expected).max()
        assert error <= 1e-5 * np.abs(expected).max(), f"{error / np.abs(expected).max():.3g} of the largest magnitude"
        return result


TINY = [
    (3, 64, 32, 1, (0,)),
    (3, 128, 96, 6, (0, 2)),
    (4, 192, 160, 7, (1, 2, 3)),
    (2, 320, 224, 6, (0, 1)),
    (5, 64, 416, 128, (4,)),
    (2, 128, 64, 128, (0, 1)),
    (3, 64, 64, 33, ()),
]


@FORMS
@CORES
@pytest.mark.parametrize("sizes", TINY, ids=str)
def test_tiny_shapes_with_tails(sizes, cores, kernel):
    Case(*sizes).check(kernel, cores)


@FORMS
@CORES
def test_without_qdq(cores, kernel):
    Case(3, 128, 96, 6, (0, 2)).check(kernel, cores, quantize=False)


@FORMS
def test_experts_rounded_before_the_sum(kernel):
    """Then the result is that of the model's own function, and on two cores, where it cannot be, it is refused."""
    case = Case(3, 128, 96, 6, (0, 2))
    case.check(kernel, 1, round_experts=True)
    with pytest.raises(AssertionError, match="round_experts on 2 cores"):
        case.run(kernel, 2, round_experts=True)


def test_the_reference_is_the_models_function():
    case = Case(3, 128, 96, 6, (0, 1, 2))
    dense = [torch.stack([decode_rows(part.codes, part.scale) for part in parts]) for parts in zip(*case.weights, strict=True)]
    weights = [torch.cat(dense[:2], 1), dense[2]]
    bank, nothing = as_bank(weights, True), torch.zeros(case.x.shape)
    ids = torch.arange(3).expand(6, 3)
    arithmetic = Arithmetic(torch.bfloat16, True, True, ops=TORCH, exact_tokens=0)
    whole = expert_by_expert(case.x, ids, case.routing.T.contiguous(), bank, nothing, LIMIT, arithmetic)
    assert torch.equal(whole, case.expected(round_experts=True))


@FORMS
def test_both_forms_and_repeated_runs_agree_to_the_bit(kernel):
    case = Case(4, 192, 160, 7, (1, 3))
    first = case.run(experts.active_experts, 2).outputs
    np.testing.assert_array_equal(first, case.run(kernel, 2).outputs)


@CORES
def test_unchosen_experts_are_not_read(cores):
    """NaN in place of their weights, and of their scales, changes nothing."""
    case = Case(4, 128, 96, 6, (1, 3))
    bank = experts_layout.stack([experts_layout.pack(*one, cores) for one in case.weights])
    w13, w2 = (tensor.numpy().copy() for tensor in bank)
    w13[[0, 2]], w2[[0, 2]] = 0xFF, 0xFF
    weights = (one.view(ml_dtypes.float8_e4m3) for one in (w13, w2))
    x = case.x.numpy().astype(ml_dtypes.bfloat16)
    found = run(experts.active_experts, x, case.routing.numpy(), *weights, limit=LIMIT, cores=cores).outputs
    np.testing.assert_array_equal(found, case.run(experts.active_experts, cores).outputs)


def test_clamps():
    """Rows large enough that gate and up pass the limit on both sides."""
    case = Case(2, 128, 96, 6, (0, 1))
    case.x *= 64
    with_limit = case.check(experts.local_experts, 1).outputs
    assert not np.allclose(with_limit, experts_reference.local_experts(case.x, case.routing, case.weights, 0.0).numpy())


def test_fp8_codes_reach_the_tensor_engine_unchanged():
    """The emulator's float8_e4m3, which is ml_dtypes', decodes every code of fp8_exact as the package does."""
    codes = np.array([code for code in range(256) if (code >> 3) & 15 != 15], np.uint8)
    decoded = decode_codes(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(codes.view(ml_dtypes.float8_e4m3).astype(np.float32), decoded)


@CORES
@pytest.mark.parametrize("hidden, inter", [(64, 32), (128, 96), (192, 160), (320, 224), (64, 416)])
def test_layout_keeps_every_weight_once(hidden, inter, cores):
    """Unpacked by the kernel's own arithmetic, code by code."""
    case = Case(1, hidden, inter, 1, (0,))
    w1, w3, w2 = case.weights[0]
    packed = experts_layout.pack(w1, w3, w2, cores)
    columns = experts_plan.columns_per_core(inter, cores)
    shape = experts_plan.plan(hidden, columns, cores)
    for core in range(cores):
        stream = packed.w13[core, : shape.hidden_width, shape.scale_bytes :]
        pieces = stream.split([2 * shape.hidden_tiles * tiles * shape.width for tiles in shape.up_pieces], 1)
        blocks = [piece.view(shape.hidden_width, shape.hidden_tiles, 2, -1) for piece in pieces]
        both = torch.cat(blocks, -1).permute(2, 3, 1, 0).reshape(2, columns, hidden)
        mine = slice(core * columns, min((core + 1) * columns, inter))
        count = mine.stop - mine.start
        assert torch.equal(both[:, :count], torch.stack([w1.codes[mine], w3.codes[mine]])) and not both[:, count:].any()
        pieces = packed.w2[core].split([shape.tiles * tiles * shape.hidden_width for tiles in shape.down_pieces], 1)
        down = torch.cat([piece.view(shape.width, shape.tiles, -1) for piece in pieces], -1)
        down = down.permute(2, 1, 0).reshape(hidden, columns)
        assert torch.equal(down[:, :count], w2.codes[experts_layout.hidden_order(shape, core)][:, mine])


def test_pieces_at_release_shapes():
    """Every DMA but the smallest ones of w2 reads 4 KiB or more per partition; the sizes add up."""
    for hidden, inter, cores in ((5120, 2304, 1), (5120, 2304, 2), (5120, 288, 1), (5120, 288, 2)):
        shape = experts_plan.plan(hidden, experts_plan.columns_per_core(inter, cores), cores)
        assert sum(shape.up_pieces) == shape.tiles and sum(shape.down_pieces) == shape.hidden_tiles
        assert min(shape.up_sizes) >= 4096 and min(shape.down_sizes) >= experts_plan.LEAST_BYTES
        assert sum(shape.down_pieces[: shape.down_others]) == (shape.hidden_tiles // 2 if cores == 2 else 0)


def test_refusals():
    case = Case(2, 128, 96, 6, (0, 1))
    with pytest.raises(AssertionError, match=r"laid out for 1 cores, launched on 2"):
        bank = [tensor.numpy().view(ml_dtypes.float8_e4m3) for tensor in experts_layout.pack(*case.weights[0], 1)]
        x = case.x.numpy().astype(ml_dtypes.bfloat16)
        run(experts.local_experts, x, case.routing[:1].numpy(), *(one[None] for one in bank), limit=LIMIT, cores=2)
    for change, text in (
        ({"x": torch.zeros(129, 128)}, r"x \(129, 128\): expected 1 to 128 rows"),
        ({"routing": torch.zeros(3, 6)}, r"routing: expected \(2, 6\), found \(3, 6\)"),
        ({"x": torch.zeros(6, 64)}, r"w2 \(2, 1, 96, 128\): expected 64 partitions for 192 columns per core|w13: expected"),
    ):
        changed = Case(2, 128, 96, 6, (0, 1))
        vars(changed).update(change)
        with pytest.raises(AssertionError, match=text):
            changed.run(experts.local_experts, 1)
    with pytest.raises(AssertionError, match="hidden 96 is no multiple of 64, on 2 cores"):
        experts_plan.plan(96, 32, 2)
    with pytest.raises(AssertionError, match=r"weight pieces of \d+ bytes per partition exceed"):
        experts_plan.slots([80_000, 80_000], experts_plan.UP_BYTES)
    rows = case.weights[0][0]
    with pytest.raises(CheckpointError, match="expert w3: 1 of 96 rows"):
        inexact = rows._replace(exact=torch.arange(96) != 5)
        experts_layout.pack(rows, inexact, case.weights[0][2], 1)


RELEASE = [(1, 5120, 2304), (6, 5120, 288)]


@pytest.mark.slow
@CORES
@pytest.mark.parametrize("rows", [1, 7, 128])
@pytest.mark.parametrize("sizes", RELEASE, ids=str)
def test_release_shapes(sizes, rows, cores):
    case = Case(*sizes, rows, (0,) if sizes[0] == 1 else (0, 2, 3))
    trace = case.check(experts.active_experts, cores).trace
    if trace is not None:
        assert trace.peak()["sbuf"] <= 150 * 1024 and trace.peak()["psum"] <= 16 * 1024


@pytest.mark.slow
@FORMS
def test_all_local_experts(kernel):
    """EP64: six experts, all of them chosen; EP8 x TP8: 48 shares of 288 columns, seven of them chosen."""
    Case(6, 5120, 2304, 6, tuple(range(6)), alike=True).check(kernel, 2)
    Case(48, 5120, 288, 6, (0, 5, 9, 17, 30, 31, 47)).check(kernel, 2)


PER_EXPERT = {
    "activation": 6, "dma_copy": 9, "nc_matmul": 1080, "nc_transpose": 18, "scalar_tensor_tensor": 6, "tensor_copy": 2,
    "tensor_reduce": 3, "tensor_scalar": 18, "tensor_tensor": 24,
}  # fmt: skip
PER_CALL = {
    "dma_copy": 6, "memset": 1, "nc_transpose": 44, "sendrecv": 1, "sendrecv_send": 1, "tensor_copy": 5, "tensor_tensor": 1,
}  # fmt: skip
OF_THE_QDQ = {
    "activation": 3, "nc_transpose": 18, "scalar_tensor_tensor": 6, "tensor_reduce": 3, "tensor_scalar": 12, "tensor_tensor": 3,
}  # fmt: skip


def instructions(number: int, quantize: bool = True) -> dict[str, int]:
    """What one core issues for ``number`` experts at inter 2304 on two cores."""
    left_out = {} if quantize else OF_THE_QDQ
    names = sorted({*PER_EXPERT, *PER_CALL})
    return {name: PER_CALL.get(name, 0) + number * (PER_EXPERT.get(name, 0) - left_out.get(name, 0)) for name in names}


@NO_TRACE
@pytest.mark.parametrize(("quantize", "vector"), [(True, 4.6), pytest.param(False, 2.6, marks=pytest.mark.slow)])
def test_cost_of_one_expert(quantize, vector):
    """The docstring's figures at release shapes: within 1.15 x of the memory's bound, with the QDQ and without."""
    trace = Case(1, 5120, 2304, 6, (0,)).check(experts.local_experts, 2, quantize=quantize).trace
    given = {name: count for name, count in instructions(1, quantize).items() if count}
    assert trace.counts(0) == given and trace.counts(1) == given
    assert trace.critical_path_us() == pytest.approx(56.0, abs=0.1)
    assert trace.critical_path_us() <= 1.15 * BOUND_US
    busy = trace.busy()
    assert busy["vector"] == pytest.approx(vector, abs=0.1) and busy["tensor"] < busy["dma"] < 1.05 * BOUND_US
    assert trace.peak()["sbuf"] <= 47 * 1024 and trace.peak()["psum"] <= 8 * 1024


@NO_TRACE
@pytest.mark.slow
def test_cost_of_further_experts():
    trace = Case(2, 5120, 2304, 6, (0, 1), alike=True).run(experts.local_experts, 2).trace
    assert trace.counts(0) == instructions(2)
    assert trace.critical_path_us() == pytest.approx(56.0 + 50.5, abs=0.2)
    trace = Case(8, 5120, 288, 6, tuple(range(8))).run(experts.local_experts, 2).trace
    assert trace.count("nc_matmul", 0) == 8 * 240
    assert trace.critical_path_us() == pytest.approx(8 * 7.7 + 10.6, abs=0.3)
    assert trace.busy()["vector"] < 0.3 * trace.busy()["dma"]


@NO_TRACE
@pytest.mark.slow
@pytest.mark.parametrize("active", [(), (3,), (0, 2, 5)], ids=len)
def test_cost_of_active_experts(active):
    """Of six experts at inter 2304: n times the bound and 1.7 us, and 7.7 us."""
    trace = Case(6, 5120, 2304, 6, active, alike=True).run(experts.active_experts, 2).trace
    count = max(len(active), 1)
    assert trace.count("nc_matmul", 0) == 1080 * count
    assert trace.dma_bytes(0) <= (count + 0.02) * 3 * 5120 * 2304 / 2
    assert trace.critical_path_us() == pytest.approx(count * (BOUND_US + 1.7) + 7.7, abs=0.2)
    assert trace.busy()["vector"] < 0.15 * trace.busy()["dma"]


@pytest.mark.parametrize(
    "source",
    [experts, experts_hidden, experts_plan, experts_stream, experts_tiles],
    ids=lambda module: module.__name__.rsplit(".", 1)[-1],
)
def test_lint(source):
    assert lint(source.__file__) == []
