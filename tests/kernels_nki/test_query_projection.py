# SPDX-License-Identifier: Apache-2.0
"""What attention, compressor and indexer read of a layer's input, in one launch, against the model's functions."""

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


def coarse(*shape: int, seed: int) -> Tensor:
    """Small multiples of powers of two, so that sums are exact in any order and round the same way."""
    return ((normal(*shape, seed=seed) * 4).round() / 16).bfloat16()


class Case:
    """The further weight of qr is the identity, so that its result is qr; those of x are as wide as ``beside`` says."""

    def __init__(
        self, count: int, k: int, low: int, n: int, dim: int, quantize: bool = True, beside: tuple[tuple[int, bool], ...] = ()
    ):
        self.quantize, self.beside, self.rounds = quantize, beside, tuple(rounds for _, rounds in beside)
        self.x = (normal(count, k) * 8).round().clamp(-15, 15).bfloat16()
        self.norm, self.wq_b = 1 + normal(1, low, seed=2) / 4, normal(n, low, seed=3).bfloat16()
        self.wq_a, self.wkv = coarse(low, k, seed=low), coarse(dim, k, seed=dim)
        self.of_qr = [torch.eye(low).bfloat16()] if beside else []
        self.of_x = [coarse(wide, k, seed=10 + i) for i, (wide, _) in enumerate(beside)]

    def run(self, cores: int) -> Result:
        def packed(*weights: Tensor) -> list[np.ndarray]:
            return [array(linear_layout.pack(weight, cores)) for weight in weights]

        streamed = [self.wkv, self.wq_b, *self.of_qr, *self.of_x]
        operands = array(self.x), *packed(self.wq_a), array(self.norm), *packed(*streamed)
        options = {"columns": tuple(len(weight) for weight in streamed), "rounds": self.rounds, "eps": EPS}
        return run(module.query_projection, *operands, quantize=self.quantize, cores=cores, **options)

    def check(self, cores: int) -> None:
        kv, q, qr, *of_x = (tensor(one) for one in self.run(cores).outputs)
        x = self.rounded(self.x.float())
        low = self.product(x, self.wq_a)
        expected = self.rounded(linear.rms_norm(low[None], self.norm[0], EPS, BF16)[0])
        differ = (qr.float() != expected).float().mean()
        assert differ < 0.01, f"{differ:.3%} of qr differ"
        np.testing.assert_allclose(qr.float(), expected, rtol=2.0**-3, atol=float(expected.abs().max()) * 2.0**-9)
        np.testing.assert_array_equal(kv.float(), self.product(x, self.wkv))
        close(array(q), self.product(qr.float(), self.wq_b), torch.bfloat16, inner=1e-5)
        for found, weight, rounds in zip(of_x, self.of_x, self.rounds, strict=True):
            assert found.dtype == (torch.bfloat16 if rounds else torch.float32)
            np.testing.assert_array_equal(found.float(), self.product(self.x.float(), weight, rounds))

    def rounded(self, x: Tensor) -> Tensor:
        return qdq_fp8(x) if self.quantize else x

    @staticmethod
    def product(x: Tensor, weight: Tensor, rounds: bool = True) -> Tensor:
        return rows.linear(x[None], weight.float(), rounds, BF16)[0]


@CORES
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("count", [1, 6, 7, 32])
@pytest.mark.parametrize(
    ("sizes", "beside"),
    [
        ((128, 256, 40, 32), ((8, True),)),
        ((256, 512, 1, 64), ((64, False), (64, False), (3, True))),
        ((384, 1280, 130, 96), ((96, True), (5, True))),
    ],
)
def test_small_shapes(sizes, beside, count, quantize, cores):
    """As index sources have it, and the same bits of what a layer without an indexer has."""
    case, alone = Case(count, *sizes, quantize, beside), Case(count, *sizes, quantize)
    case.check(cores)
    for found, expected in zip(alone.run(cores).outputs, case.run(cores).outputs, strict=False):
        np.testing.assert_array_equal(found, expected)


@CORES
@pytest.mark.parametrize("count", [1, 6])
def test_release_shape(count, cores):
    Case(count, 5120, 1280, 4096, 512, beside=((512, False), (512, False), (32, True))).check(cores)


@pytest.mark.parametrize(("k", "low"), [(384, 1280), (256, 512)])
def test_a_row_has_the_same_bits_beside_others(k, low):
    case, alone = (Case(count, k, low, 40, 32, beside=((8, True), (6, False))) for count in (6, 1))
    alone.x = case.x[3:4]
    for found, expected in zip(alone.run(2).outputs, case.run(2).outputs, strict=True):
        np.testing.assert_array_equal(found[0], expected[3])


def test_refusals():
    for sizes, change, text in (
        ((33, 128, 256, 8, 8), {}, "33 rows: expected 1 to 32"),
        ((2, 96, 256, 8, 8), {}, "96 x 256 on 1 cores: expected multiples of 128"),
        ((2, 128, 192, 8, 8), {}, "128 x 192 on 1 cores: expected multiples of 128"),
        ((2, 128, 256, 8, 8), {"norm": normal(2, 256)}, r"q_norm \(2, 256\), expected \(1, 256\)"),
        ((2, 128, 256, 8, 8), {"norm": normal(1, 128)}, r"weight: expected \(1, 128, 128\) for 128 x 128, found"),
        ((2, 128, 256, 8, 8), {"wkv": coarse(8, 256, seed=1)}, r"weight: expected \(1, 128, 8\) for 128 x 8"),
        ((2, 128, 256, 8, 8), {"wq_b": coarse(8, 128, seed=1)}, r"weight: expected \(1, 128, 16\) for 256 x 8"),
        ((2, 128, 256, 8, 8), {"wkv": normal(8, 128)}, "x bfloat16, wq_a bfloat16, weight float32: bfloat16 only"),
        ((2, 128, 256, 8, 8), {"rounds": (True,)}, r"expected \(2, 0\) for these weights, found \(2, 1\)"),
    ):
        case = Case(*sizes)
        vars(case).update(change)
        with pytest.raises(AssertionError, match=text):
            case.run(1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
@pytest.mark.parametrize(
    ("beside", "index", "critical", "ratio"),
    [
        ((), 0, 47.4, 1.20),
        (((512, False), (512, False), (32, True)), 4096, 78.4, 1.14),
        (((512, True), (32, True)), 4096, 71.0, 1.15),
        (((32, True),), 4096, 63.6, 1.17),
    ],
)
def test_cost(beside, index, critical, ratio):
    """The docstring's figures: with the latency of load and store within 1.3 times the memory's bound."""
    case = Case(6, 5120, 1280, 4096, 512, beside=beside)
    case.of_qr = [normal(index, 1280).bfloat16()] if index else []
    trace, wide = case.run(2).trace, sum(one for one, _ in beside)
    bound = (5120 * (1792 + wide) + 1280 * (4096 + index)) / 362_500
    for core in (0, 1):
        assert trace.count("nc_matmul", core) == 40 * 5 + 40 + 10 * 4 * (1 + len(case.of_qr)) + 40 * len(beside) + 2
    assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
    assert trace.critical_path_us() <= ratio * bound
    assert trace.busy()["vector"] < 6.4
    assert trace.peak()["sbuf"] <= 48 * 1024


@pytest.mark.parametrize("source", [module, low_rank])
def test_lint(source):
    assert lint(source.__file__) == []
