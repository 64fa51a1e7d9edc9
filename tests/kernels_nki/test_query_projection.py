# SPDX-License-Identifier: Apache-2.0
"""What attention, compressor and indexer read of a layer's input, in one launch, against the model's functions."""

import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, close, normal, tensor
from nki_emulator import Result, lint, real_nki, run
from rotary import table_of
from torch import Tensor

from modeling_deepseek_v41 import linear, rope, rows
from modeling_deepseek_v41.formats import qdq_fp8
from modeling_deepseek_v41.kernels.nki import linear_layout, low_rank, rms_norm, rotate, slot_norm, window_kv
from modeling_deepseek_v41.kernels.nki import query_projection as module

EPS = 1e-20
BF16 = arithmetic(torch.bfloat16)


def coarse(*shape: int, seed: int) -> Tensor:
    """Small multiples of powers of two, so that sums are exact in any order and round the same way."""
    return ((normal(*shape, seed=seed) * 4).round() / 16).bfloat16()


class Case:
    """The further weight of qr is the identity, so that its result is qr; those of x are as wide as ``beside`` says."""

    def __init__(
        self, count: int, k: int, low: int, n: int, dim: int, quantize: bool = True, beside: tuple[tuple[int, bool], ...] = (),
        rotary: int = 64,
    ):  # fmt: skip
        self.quantize, self.beside, self.rounds = quantize, beside, tuple(rounds for _, rounds in beside)
        self.x = (normal(count, k) * 8).round().clamp(-15, 15).bfloat16()
        self.norm, self.wq_b = 1 + normal(1, low, seed=2) / 4, normal(n, low, seed=3).bfloat16()
        self.wq_a, self.wkv = coarse(low, k, seed=low), coarse(dim, k, seed=dim + 1)
        self.kv_norm, self.table = 1 + normal(1, dim, seed=4) / 4, table_of(count, rotary)
        self.of_qr = [torch.eye(low).bfloat16()] if beside else []
        self.of_x = [coarse(wide, k, seed=10 + i) for i, (wide, _) in enumerate(beside)]

    def run(self, cores: int) -> Result:
        def packed(*weights: Tensor) -> list[np.ndarray]:
            return [array(linear_layout.pack(weight, cores)) for weight in weights]

        streamed = [self.wq_b, *self.of_qr, *self.of_x]
        narrow = *packed(self.wq_a), array(self.norm), *packed(self.wkv), array(self.kv_norm)
        operands = array(self.x), array(self.table), *narrow, *packed(*streamed)
        options = {"columns": tuple(len(weight) for weight in streamed), "rounds": self.rounds, "eps": EPS}
        return run(module.query_projection, *operands, quantize=self.quantize, cores=cores, **options)

    def check(self, cores: int) -> None:
        kv, q, qr, *of_x = (tensor(one) for one in self.run(cores).outputs)
        x = self.rounded(self.x.float())
        low, latent = (linear.rms_norm(self.product(x, one)[None], weight[0], EPS, BF16) for one, weight in self.normed())
        cached = qdq_fp8(rope.rotate(latent, self.table[None], BF16))
        for found, expected in ((qr.float(), self.rounded(low[0])), (kv.float(), cached[0])):
            differ = (found != expected).float().mean()
            assert differ < 0.01, f"{differ:.3%} differ"
            np.testing.assert_allclose(found, expected, rtol=2.0**-3, atol=float(expected.abs().max()) * 2.0**-9)
        close(array(q), self.product(qr.float(), self.wq_b), torch.bfloat16, inner=1e-5)
        for found, weight, rounds in zip(of_x, self.of_x, self.rounds, strict=True):
            assert found.dtype == (torch.bfloat16 if rounds else torch.float32)
            np.testing.assert_array_equal(found.float(), self.product(self.x.float(), weight, rounds))

    def normed(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return (self.wq_a, self.norm), (self.wkv, self.kv_norm)

    def rounded(self, x: Tensor) -> Tensor:
        return qdq_fp8(x) if self.quantize else x

    @staticmethod
    def product(x: Tensor, weight: Tensor, rounds: bool = True) -> Tensor:
        return rows.linear(x[None], weight.float(), rounds, BF16)[0]


@CORES
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("count", [1, 6, 7, 32])
@pytest.mark.parametrize(
    ("sizes", "rotary", "beside"),
    [
        ((128, 256, 40, 256), 128, ((8, True),)),
        ((256, 256, 1, 1280), 64, ((64, False), (64, False), (3, True))),
        ((384, 1280, 130, 512), 6, ((96, True), (5, True))),
    ],
)
def test_small_shapes(sizes, rotary, beside, count, quantize, cores):
    """As index sources have it, and the same bits of what a layer without an indexer has."""
    case, alone = (Case(count, *sizes, quantize, weights, rotary) for weights in (beside, ()))
    case.check(cores)
    for found, expected in zip(alone.run(cores).outputs, case.run(cores).outputs, strict=False):
        np.testing.assert_array_equal(found, expected)


@CORES
@pytest.mark.parametrize("count", [1, 6])
def test_release_shape(count, cores):
    Case(count, 5120, 1280, 4096, 512, beside=((512, False), (512, False), (32, True))).check(cores)


@CORES
@pytest.mark.parametrize("count", [1, 6])
def test_window_kv_is_what_three_kernels_give(count, cores):
    """``rms_norm`` and ``rotate`` behind the product: equal but for a scale whose last bit the order of a sum decides."""
    case = Case(count, 5120, 1280, 8, 512)
    latent = array(case.product(qdq_fp8(case.x.float()), case.wkv).bfloat16())
    normed = run(rms_norm.rms_norm, latent, array(case.kv_norm), EPS, cores=cores).outputs
    expected = run(rotate.rotate, normed[:, None], array(case.table), quantize=True, cores=cores).outputs[:, 0]
    assert (case.run(cores).outputs[0] == expected).mean() > 0.999


@pytest.mark.parametrize(("k", "low", "dim"), [(384, 1280, 256), (256, 512, 1280)])
def test_a_row_has_the_same_bits_beside_others(k, low, dim):
    case, alone = (Case(count, k, low, 40, dim, beside=((8, True), (6, False))) for count in (6, 1))
    alone.x, alone.table = case.x[3:4], case.table[3:4]
    for found, expected in zip(alone.run(2).outputs, case.run(2).outputs, strict=True):
        np.testing.assert_array_equal(found[0], expected[3])


def test_refusals():
    for sizes, change, text in (
        ((33, 128, 256, 8, 128), {}, "33 rows: expected 1 to 32"),
        ((2, 96, 256, 8, 128), {}, "96 x 256 on 1 cores: expected multiples of 128"),
        ((2, 128, 192, 8, 128), {}, "128 x 192 on 1 cores: expected multiples of 128"),
        ((2, 128, 256, 8, 192), {}, r"kv_norm \(1, 192\) on 1 cores: expected 128s per core"),
        ((2, 128, 256, 8, 128), {"norm": normal(2, 256)}, r"q_norm \(2, 256\), expected \(1, 256\)"),
        ((2, 128, 256, 8, 128), {"kv_norm": normal(2, 128)}, r"kv_norm \(2, 128\), expected \(1, 128\)"),
        ((2, 128, 256, 8, 128), {"table": table_of(3, 64)}, r"table \(3, 2, 64\), expected \(2, 2, 64\)"),
        ((2, 128, 256, 8, 256), {"table": table_of(2, 130)}, r"table \(2, 2, 130\): an even number of columns, at most 128"),
        ((2, 128, 256, 8, 128), {"table": normal(2, 2, 7)}, r"table \(2, 2, 7\): an even number of columns, at most 128"),
        ((2, 128, 256, 8, 128), {"norm": normal(1, 128)}, r"weight: expected \(1, 128, 128\) for 128 x 128, found"),
        ((2, 128, 256, 8, 128), {"wkv": coarse(128, 256, seed=1)}, r"weight: expected \(1, 128, 128\) for 128 x 128"),
        ((2, 128, 256, 8, 128), {"wq_b": coarse(8, 128, seed=1)}, r"weight: expected \(1, 128, 16\) for 256 x 8"),
        ((2, 128, 256, 8, 128), {"wkv": normal(128, 128)}, "x bfloat16, wq_a bfloat16, wkv float32: bfloat16 only"),
        ((2, 128, 256, 8, 128), {"wq_b": normal(8, 256)}, "weight float32: bfloat16 only"),
        ((2, 128, 256, 8, 128), {"rounds": (True,)}, r"expected \(1, 0\) for these weights, found \(1, 1\)"),
    ):
        case = Case(*sizes)
        vars(case).update(change)
        with pytest.raises(AssertionError, match=text):
            case.run(1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
@pytest.mark.parametrize(
    ("beside", "index", "critical", "ratio"),
    [
        ((), 0, 47.6, 1.20),
        (((512, False), (512, False), (32, True)), 4096, 78.6, 1.14),
        (((512, True), (32, True)), 4096, 71.2, 1.16),
        (((32, True),), 4096, 63.8, 1.17),
    ],
)
def test_cost(beside, index, critical, ratio):
    """The docstring's figures: with the latency of load and store within 1.3 times the memory's bound."""
    case = Case(6, 5120, 1280, 4096, 512, beside=beside)
    case.of_qr = [normal(index, 1280).bfloat16()] if index else []
    trace, wide = case.run(2).trace, sum(one for one, _ in beside)
    bound = (5120 * (1792 + wide) + 1280 * (4096 + index)) / 362_500
    for core in (0, 1):
        assert trace.count("nc_matmul", core) == 40 * (5 + 2 + len(beside)) + 10 * 4 * (1 + len(case.of_qr)) + 3
    assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
    assert trace.critical_path_us() <= ratio * bound
    assert trace.busy()["vector"] < 8.3
    assert trace.peak()["sbuf"] <= 48 * 1024


@pytest.mark.parametrize("source", [module, low_rank, slot_norm, window_kv])
def test_lint(source):
    assert lint(source.__file__) == []
