# SPDX-License-Identifier: Apache-2.0
"""wq_a, q_norm, QDQ, wq_b and wkv in one launch against the model's functions."""

import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, close, normal, tensor
from nki_emulator import Result, lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41 import linear, rows
from modeling_deepseek_v41.formats import qdq_fp8
from modeling_deepseek_v41.kernels.nki import linear_layout, low_rank
from modeling_deepseek_v41.kernels.nki import query_projection as module

EPS = 1e-20
BF16 = arithmetic(torch.bfloat16)


class Case:
    """Small multiples of powers of two, so that the sums of wq_a and wkv are exact in any order and round the same way."""

    def __init__(self, count: int, k: int, low: int, n: int, dim: int, quantize: bool = True):
        self.sizes, self.quantize = {"low": low, "columns": n, "dim": dim}, quantize
        self.x = (normal(count, k) * 8).round().clamp(-15, 15).bfloat16()
        self.wq_a, self.wkv = (((normal(wide, k, seed=wide) * 4).round() / 16).bfloat16() for wide in (low, dim))
        self.norm, self.wq_b = 1 + normal(1, low, seed=2) / 4, normal(n, low, seed=3).bfloat16()

    def run(self, cores: int) -> Result:
        wq_a, wq_b, wkv = (array(linear_layout.pack(one, cores)) for one in (self.wq_a, self.wq_b, self.wkv))
        options = {"eps": EPS, "quantize": self.quantize, "cores": cores} | self.sizes
        return run(module.query_projection, array(self.x), wq_a, array(self.norm), wq_b, wkv, **options)

    def check(self, cores: int) -> None:
        q, qr, kv = (tensor(one) for one in self.run(cores).outputs)
        x = self.rounded(self.x.float())
        low = self.product(x, self.wq_a)
        expected = self.rounded(linear.rms_norm(low[None], self.norm[0], EPS, BF16)[0])
        differ = (qr.float() != expected).float().mean()
        assert differ < 0.01, f"{differ:.3%} of qr differ"
        np.testing.assert_allclose(qr.float(), expected, rtol=2.0**-3, atol=float(expected.abs().max()) * 2.0**-9)
        np.testing.assert_array_equal(kv.float(), self.product(x, self.wkv))
        close(array(q), self.product(qr.float(), self.wq_b), torch.bfloat16, inner=1e-5)

    def rounded(self, x: Tensor) -> Tensor:
        return qdq_fp8(x) if self.quantize else x

    @staticmethod
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return rows.linear(x[None], weight.float(), True, BF16)[0]


@CORES
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("count", [1, 6, 7, 32])
@pytest.mark.parametrize(("k", "low", "n", "dim"), [(128, 256, 40, 32), (256, 512, 1, 64), (384, 1280, 130, 96)])
def test_small_shapes(k, low, n, dim, count, quantize, cores):
    Case(count, k, low, n, dim, quantize).check(cores)


@CORES
@pytest.mark.parametrize("count", [1, 6])
def test_release_shape(count, cores):
    Case(count, 5120, 1280, 4096, 512).check(cores)


def test_refusals():
    for sizes, change, text in (
        ((33, 128, 256, 8, 8), {}, "33 rows: expected 1 to 32"),
        ((2, 96, 256, 8, 8), {}, "96 x 256 on 1 cores: expected multiples of 128"),
        ((2, 128, 192, 8, 8), {}, "128 x 192 on 1 cores: expected multiples of 128"),
        ((2, 128, 256, 8, 8), {"norm": normal(1, 128)}, r"q_norm \(1, 128\), expected \(1, 256\)"),
        ((2, 128, 256, 8, 8), {"wkv": normal(9, 128).bfloat16()}, r"weight: expected \(1, 128, 8\)"),
    ):
        case = Case(*sizes)
        vars(case).update(change)
        with pytest.raises(AssertionError, match=text):
            case.run(1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The docstring's figures: with the latency of load and store within 1.3 times the memory's bound."""
    trace = Case(6, 5120, 1280, 4096, 512).run(2).trace
    bound = (5120 * 1792 + 1280 * 4096) / 362_500
    for core in (0, 1):
        assert trace.count("nc_matmul", core) == 40 * 5 + 40 + 10 * 4 + 2
    assert trace.critical_path_us() == pytest.approx(48.3, abs=0.06)
    assert trace.critical_path_us() <= 1.22 * bound
    assert trace.peak()["sbuf"] <= 62 * 1024


@pytest.mark.parametrize("source", [module, low_rank])
def test_lint(source):
    assert lint(source.__file__) == []
