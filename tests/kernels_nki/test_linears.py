# SPDX-License-Identifier: Apache-2.0
"""Several linears in one launch: bit for bit what each gives alone, and rows.grouped."""

import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, close, normal
from nki_emulator import Result, lint, real_nki, run

from modeling_deepseek_v41 import rows as reference
from modeling_deepseek_v41.kernels.nki import linear, linear_layout, linear_stream
from modeling_deepseek_v41.kernels.nki import linears as module

NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
US_PER_WEIGHT = 2 / 2 / 362_500
"""Of a bf16 weight that two cores read."""


class Case:
    """Random rows of one input and two or three weights, quantised and rounded in turn."""

    def __init__(self, rows: int, k: int, columns: tuple[int, ...], quantize: tuple[bool, ...]):
        self.x, self.columns, self.quantize = (normal(rows, k) * 4).bfloat16(), columns, quantize
        self.weights = [normal(n, k, seed=i).bfloat16() for i, n in enumerate(columns)]
        self.rounds = tuple(i % 2 == 1 for i in range(len(columns)))

    def run(self, cores: int) -> Result:
        weights = [array(linear_layout.pack(weight, cores)) for weight in self.weights]
        options = {"columns": self.columns, "quantize": self.quantize, "rounds": self.rounds}
        return run(module.linears, array(self.x), *weights, cores=cores, **options)

    def alone(self, i: int, cores: int) -> Result:
        weight = array(linear_layout.pack(self.weights[i], cores))
        options = {"quantize": self.quantize[i], "rounds": self.rounds[i]}
        return run(linear.linear, array(self.x), weight, self.columns[i], cores=cores, **options)

    def bound(self) -> float:
        return sum(self.columns) * self.x.shape[1] * US_PER_WEIGHT


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 128, 131])
@pytest.mark.parametrize(
    ("k", "columns", "quantize"),
    [
        (96, (40, 33), (False, True)),
        (320, (1, 600), (True, True)),
        (128, (5, 64, 7), (True, False, True)),
        (100, (3, 9, 2), (False, False, False)),
    ],
)
def test_each_as_alone(k, columns, quantize, rows, cores):
    case = Case(rows, k, columns, quantize)
    for i, found in enumerate(case.run(cores).outputs):
        np.testing.assert_array_equal(found, case.alone(i, cores).outputs)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 128])
@pytest.mark.parametrize(("groups", "k", "n"), [(1, 64, 40), (3, 320, 33), (2, 1024, 256)])
def test_grouped(groups, k, n, rows, cores):
    x, weight = (normal(rows, groups, k) * 4).bfloat16(), normal(groups, n, k, seed=1).bfloat16()
    packed = torch.stack([linear_layout.pack(one, cores) for one in weight])
    found = run(module.grouped_linear, array(x), array(packed), n, rounds=False, cores=cores).outputs
    expected = reference.grouped(x.float()[None], weight.float(), arithmetic(torch.float32))[0]
    close(found, expected, torch.float32)
    rounded = run(module.grouped_linear, array(x), array(packed), n, cores=cores).outputs
    np.testing.assert_array_equal(rounded, found.astype(rounded.dtype))


@pytest.mark.slow
def test_many_rows():
    case = Case(4096, 1280, (512, 256), (True, False))
    for i, found in enumerate(case.run(2).outputs):
        np.testing.assert_array_equal(found, case.alone(i, 2).outputs)


def test_refusals():
    case = Case(2, 64, (8, 4), (False, False))
    x = array(case.x)
    first, second = (array(linear_layout.pack(weight, 1)) for weight in case.weights)
    options = {"columns": (8, 4), "quantize": (False, False), "rounds": (True, True)}
    for arguments, change, text in (
        ((x, first, second), {"columns": (8, 4, 4)}, r"one for each of 2 weights, found \(3, 2, 2\)"),
        ((x, first, first), {}, r"weight: expected \(1, 64, 4\) for 64 x 4, found \(1, 64, 8\)"),
        ((x, first, second.astype(np.float32)), {}, "weight float32: bfloat16 only"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(module.linears, *arguments, **(options | change))
    with pytest.raises(AssertionError, match=r"weight \(1, 1, 64, 8\): expected 2 groups"):
        run(module.grouped_linear, array(normal(3, 2, 64).bfloat16()), first[None], 8)


@NO_TRACE
@pytest.mark.parametrize(
    ("columns", "quantize", "critical", "apart", "ratio"),
    [((384, 576), (False, True), 20.1, 25.4, 1.49), ((1024, 32, 1792), (False, False, True), 47.5, 58.8, 1.19)],
)
def test_cost(columns, quantize, critical, apart, ratio):
    """One launch, and the sum of a launch for each; ratios to the memory's bound with the fixed latency in it."""
    case = Case(6, 5120, columns, quantize)
    trace = case.run(2).trace
    alone = sum(case.alone(i, 2).trace.critical_path_us() for i in range(len(columns)))
    assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
    assert alone == pytest.approx(apart, abs=0.1)
    assert trace.critical_path_us() <= ratio * case.bound()
    assert trace.peak()["sbuf"] <= 60 * 1024


@NO_TRACE
def test_cost_of_groups():
    x, packed = normal(6, 8, 4096).bfloat16(), linear_layout.pack(normal(1024, 4096).bfloat16(), 2)
    trace = run(module.grouped_linear, array(x), array(packed.expand(8, -1, -1, -1)), 1024, cores=2).trace
    bound = 8 * 4096 * 1024 * US_PER_WEIGHT
    assert trace.critical_path_us() == pytest.approx(103.3, abs=0.06)
    assert trace.critical_path_us() <= 1.12 * bound


@pytest.mark.parametrize("source", [module, linear_stream])
def test_lint(source):
    assert lint(source.__file__) == []
