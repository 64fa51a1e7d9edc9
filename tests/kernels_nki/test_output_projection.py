# SPDX-License-Identifier: Apache-2.0
"""wo_a, QDQ and wo_b in one launch against rows.linear twice."""

import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, close, normal
from nki_emulator import Result, lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41 import rows as reference
from modeling_deepseek_v41.formats import qdq_fp8
from modeling_deepseek_v41.kernels.nki import linear_layout
from modeling_deepseek_v41.kernels.nki import output_projection as module


class Case:
    """Small multiples of powers of two, so that the sums of wo_a are exact in any order and round the same way."""

    def __init__(self, rows: int, k: int, low: int, n: int, quantize: bool = True):
        self.low, self.n, self.quantize = low, n, quantize
        self.o = (normal(rows, k) * 8).round().clamp(-15, 15).bfloat16()
        self.wo_a = ((normal(low, k, seed=1) * 4).round() / 16).bfloat16()
        self.wo_b = normal(n, low, seed=2).bfloat16()

    def run(self, cores: int, rounds: bool = False) -> Result:
        weights = [array(linear_layout.pack(weight, cores)) for weight in (self.wo_a, self.wo_b)]
        options = {"low": self.low, "columns": self.n, "quantize": self.quantize, "rounds": rounds}
        return run(module.output_projection, array(self.o), *weights, cores=cores, **options)

    def expected(self) -> Tensor:
        low = reference.linear(self.o.float()[None], self.wo_a.float(), True, arithmetic(torch.bfloat16))
        low = qdq_fp8(low) if self.quantize else low
        return reference.linear(low, self.wo_b.float(), False, arithmetic(torch.bfloat16))[0]


@CORES
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("rows", [1, 6, 7, 32])
@pytest.mark.parametrize(("k", "low", "n"), [(128, 256, 40), (256, 512, 1), (384, 1024, 130), (128, 1280, 64)])
def test_small_shapes(k, low, n, rows, quantize, cores):
    case = Case(rows, k, low, n, quantize)
    plain = case.run(cores).outputs
    close(plain, case.expected(), torch.float32)
    rounded = case.run(cores, rounds=True).outputs
    np.testing.assert_array_equal(rounded, plain.astype(rounded.dtype))


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_release_shape(rows, cores):
    case = Case(rows, 4096, 1024, 5120)
    close(case.run(cores).outputs, case.expected(), torch.float32)


def test_refusals():
    case = Case(2, 128, 256, 8)
    o, wo_a, wo_b = array(case.o), *(array(linear_layout.pack(weight, 1)) for weight in (case.wo_a, case.wo_b))
    for arguments, text in (
        ((array(normal(33, 128).bfloat16()), wo_a, wo_b, 256, 8), "33 rows: expected 1 to 32"),
        ((o[:, :96], wo_a, wo_b, 256, 8), "96 x 256 on 1 cores: expected multiples of 128"),
        ((o, wo_a, wo_b, 192, 8), "128 x 192 on 1 cores: expected multiples of 128"),
        ((o, wo_a[:, :, :128], wo_b, 256, 8), r"weight: expected \(1, 128, 256\)"),
        ((o, wo_a, wo_b.astype(np.float32), 256, 8), "bfloat16 only"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(module.output_projection, *arguments)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The docstring's figures: with the latency of load and store within 1.3 times the memory's bound."""
    trace = Case(6, 4096, 1024, 5120).run(2).trace
    bound = (4096 * 1024 + 1024 * 5120) / 362_500
    assert trace.count("nc_matmul", 0) == 32 * 4 + 8 * 5
    assert trace.critical_path_us() == pytest.approx(33.1, abs=0.06)
    assert trace.critical_path_us() <= 1.28 * bound
    assert trace.busy()["vector"] < 1.5
    assert trace.peak()["sbuf"] <= 40 * 1024


def test_lint():
    assert lint(module.__file__) == []
