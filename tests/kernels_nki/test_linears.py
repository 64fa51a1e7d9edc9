# SPDX-License-Identifier: Apache-2.0
"""Several linears in one launch: bit for bit what each gives alone, and rows.grouped."""

import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, close, normal
from nki_emulator import Result, lint, real_nki, run

from modeling_deepseek_v41 import rows as reference
from modeling_deepseek_v41.kernels.nki import activation_qdq, linear, linear_layout, linear_stream
from modeling_deepseek_v41.kernels.nki import linears as module

NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
US_PER_WEIGHT = 2 / 2 / 362_500
"""Of a bf16 weight that two cores read."""


class Case:
    """Random rows of one input, or one for each of two or three weights."""

    def __init__(self, inputs: int, rows: int, k: int, columns: tuple[int, ...], quantize: bool = True):
        self.x, self.columns, self.quantize = (normal(inputs, rows, k) * 4).bfloat16(), columns, quantize
        self.weights = [normal(n, k, seed=i).bfloat16() for i, n in enumerate(columns)]

    def run(self, cores: int) -> Result:
        weights = [array(linear_layout.pack(weight, cores)) for weight in self.weights]
        return run(module.linears, array(self.x), *weights, columns=self.columns, quantize=self.quantize, cores=cores)

    def alone(self, i: int, cores: int, quantize: bool) -> Result:
        weight, x = array(linear_layout.pack(self.weights[i], cores)), array(self.x.expand(len(self.columns), -1, -1)[i])
        return run(linear.linear, x, weight, self.columns[i], quantize=quantize, cores=cores)


@CORES
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("rows", [1, 6, 7, 32])
@pytest.mark.parametrize(
    ("inputs", "k", "columns"),
    [(1, 96, (40, 33)), (2, 320, (1, 600)), (3, 128, (5, 64, 7)), (1, 1536, (3, 9, 2)), (2, 2560, (40, 8))],
)
def test_each_as_alone(inputs, k, columns, rows, quantize, cores):
    case = Case(inputs, rows, k, columns, quantize)
    for i, found in enumerate(case.run(cores).outputs):
        np.testing.assert_array_equal(found, case.alone(i, cores, quantize).outputs)


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


def test_refusals():
    case = Case(1, 2, 64, (8, 4))
    x = array(case.x)
    first, second = (array(linear_layout.pack(weight, 1)) for weight in case.weights)
    for arguments, columns, text in (
        ((x, first, second), (8, 4, 4), "columns: expected one for each of 2 weights, found 3"),
        ((x, first, first), (8, 4), r"weight: expected \(1, 64, 4\) for 64 x 4, found \(1, 64, 8\)"),
        ((x, first, second.astype(np.float32)), (8, 4), "weight float32: bfloat16 only"),
        ((x.astype(np.float32), first, second), (8, 4), "x float32: bfloat16 only"),
        ((np.concatenate([x] * 3), first, second), (8, 4), r"x \(3, 2, 64\): expected one input, or one for each of 2 weights"),
        ((np.concatenate([x] * 20, 1), first, second), (8, 4), r"x \(1, 40, 64\): expected 1 to 32 rows"),
        ((x[:, :, :48], first[:, :48], second[:, :48]), (8, 4), "columns no multiple of 32"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(module.linears, *arguments, columns=columns)
    with pytest.raises(AssertionError, match=r"weight \(1, 1, 64, 8\): expected 2 groups"):
        run(module.grouped_linear, array(normal(3, 2, 64).bfloat16()), first[None], 8)


@NO_TRACE
@pytest.mark.parametrize(
    ("inputs", "k", "columns", "critical", "apart", "ratio"),
    [(1, 5120, (512, 512, 512), 28.1, 46.1, 1.30), (2, 6144, (400, 400), 20.4, 39.6, 1.51)],
)
def test_cost(inputs, k, columns, critical, apart, ratio):
    """One launch, and the sum of one for each input's QDQ and weight; ratios to the memory's bound with fixed latency."""
    case = Case(inputs, 6, k, columns)
    trace = case.run(2).trace
    alone = sum(case.alone(i, 2, False).trace.critical_path_us() for i in range(len(columns)))
    alone += sum(run(activation_qdq.activation_qdq, array(x), cores=2).trace.critical_path_us() for x in case.x)
    assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
    assert alone == pytest.approx(apart, abs=0.1)
    assert trace.critical_path_us() <= ratio * sum(columns) * k * US_PER_WEIGHT
    assert trace.peak()["sbuf"] <= 24 * 1024


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
