# SPDX-License-Identifier: Apache-2.0
"""Router, activation QDQ and a part of the shared expert in one launch against the model's functions."""

import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, normal, tensor
from nki_emulator import Result, lint, real_nki, run

from modeling_deepseek_v41.experts import as_bank
from modeling_deepseek_v41.kernels.nki import exchange, linear_layout, shared_expert, slots
from modeling_deepseek_v41.kernels.nki import route_and_share as module
from modeling_deepseek_v41.moe import route_and_share

BF16 = arithmetic(torch.bfloat16)
FACTOR, LIMIT = 1.5, 10.0


class Case:
    """Small multiples of powers of two, so that logits, gate and up are exact in any order."""

    def __init__(self, rows: int, dim: int, experts: int, inter: int, k: int):
        self.k, self.inter = k, inter
        self.x = (normal(rows, dim) * 8).round().clamp(-15, 15).bfloat16()
        self.gate = ((normal(experts, dim, seed=1) * 4).round() / 512).bfloat16()
        self.bias = normal(1, experts, seed=2) / 4
        self.w13 = ((normal(2 * inter, dim, seed=3) * 4).round() / 256).bfloat16()
        self.w2 = normal(dim, inter, seed=4).bfloat16()

    def operands(self, cores: int) -> list[np.ndarray]:
        pack = linear_layout.pack
        weights = pack(self.gate, cores), self.bias, pack(self.w13, 2), pack(self.w2, cores)
        return [array(one) for one in (self.x, *weights)]

    def run(self, cores: int, normalises: bool = True, limit: float = LIMIT) -> Result:
        options = {"columns": self.inter, "k": self.k, "normalises": normalises, "factor": FACTOR, "limit": limit}
        return run(module.route_and_share, *self.operands(cores), **options, cores=cores)

    def check(self, cores: int, normalises: bool = True, limit: float = LIMIT) -> Result:
        """Ids and QDQ to the bit, weights within 1e-5; y within 1e-5 but in rows where a value of h rounds the other way."""
        result = self.run(cores, normalises, limit)
        ids, weights, quantised, y = (tensor(one) for one in result.outputs)
        shared = as_bank([self.w13[None], self.w2[None]], False)
        options = self.k, normalises, FACTOR, shared, limit, BF16
        found = route_and_share(self.x.float()[None], self.gate.float(), self.bias[0], *options)
        expected_ids, expected_weights, expected, expected_y = (one[0] for one in found)
        assert torch.equal(ids.long(), expected_ids) and torch.equal(quantised.float(), expected)
        assert ((weights - expected_weights).abs() <= 1e-5 * expected_weights.abs().amax(-1, keepdim=True)).all()
        error = (y - expected_y).abs().amax(-1) / expected_y.abs().amax()
        assert error.max() <= 2.0**-4 and (error > 1e-5).sum() <= 1 + len(y) // 8, error
        return result


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 32])
@pytest.mark.parametrize(
    ("dim", "experts", "inter", "k"), [(256, 8, 32, 2), (256, 136, 96, 6), (768, 384, 288, 9), (1536, 24, 512, 24)]
)
def test_small_shapes(dim, experts, inter, k, rows, cores):
    """Slots of the router from one to four, the last one shorter, and of the shared expert likewise; more than eight chosen."""
    Case(rows, dim, experts, inter, k).check(cores)


@CORES
def test_options(cores):
    """Weights as they are, and no clamp."""
    Case(5, 512, 64, 160, 3).check(cores, False, 0.0)


@CORES
@pytest.mark.parametrize(("rows", "experts"), [(6, 384), (5, 128)])
def test_release_shapes(rows, experts, cores):
    """The backbone's and the drafter's."""
    Case(rows, 5120, experts, 288, 6 if experts == 384 else 3).check(cores)


@CORES
@pytest.mark.parametrize("k", [1, 6, 9, 64])
def test_equal_scores_by_lower_id(k, cores):
    """Few different scores, on either core."""
    case = Case(7, 256, 64, 32, k)
    case.gate[2:] = case.gate[:2].repeat(31, 1)
    case.bias = torch.zeros(1, 64)
    case.check(cores)
    case.gate.zero_()
    assert tensor(case.check(cores).outputs[0]).tolist() == [list(range(k))] * 7


@CORES
def test_what_fills_up_is_not_used(cores):
    """NaN in w2's rows behind the last column of h."""
    case = Case(6, 512, 64, 288, 6)
    operands, options = case.operands(cores), {"columns": 288, "k": 6, "normalises": True, "factor": FACTOR, "limit": LIMIT}
    poisoned = tensor(operands[-1])
    for block in poisoned.split(3 * min(512, 512 // cores), -1):
        block.unflatten(-1, (3, -1))[:, 32:, 2] = torch.nan
    assert poisoned.isnan().any()
    found = run(module.route_and_share, *operands[:-1], array(poisoned), **options, cores=cores).outputs
    for one, other in zip(found, case.run(cores).outputs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_refusals():
    for sizes, change, text in (
        ((33, 256, 8, 32, 2), {}, "33 rows: expected 1 to 32"),
        ((2, 128, 8, 32, 2), {}, r"x \(2, 128\) on 2 cores: expected a multiple of 128 columns per core"),
        ((2, 256, 12, 32, 2), {}, r"bias \(1, 12\) on 2 cores: expected a multiple of 4 experts per core, 8 to 1024"),
        ((2, 256, 16, 32, 17), {}, "k 17 of 16 experts"),
        ((2, 256, 16, 48, 2), {}, "48 columns: expected a multiple of 32 up to 512"),
        ((2, 256, 16, 544, 2), {}, "544 columns: expected a multiple of 32 up to 512"),
        ((2, 256, 16, 32, 2), {"gate": torch.zeros(24, 256).bfloat16()}, "gate .* for 256 x 16"),
        ((2, 256, 16, 32, 2), {"w13": torch.zeros(32, 256).bfloat16()}, "w13 .* for 256 x 32"),
        ((2, 256, 16, 32, 2), {"w2": torch.zeros(128, 32).bfloat16()}, "w2 .* for 32 x 256"),
        ((2, 256, 16, 32, 2), {"x": torch.zeros(2, 256)}, "x, gate, w13, w2: float32, bfloat16, bfloat16, bfloat16; bfloat16"),
    ):
        case = Case(*sizes)
        vars(case).update(change)
        with pytest.raises(AssertionError, match=text):
            case.run(2)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The docstring's figures: 1.30 times the bytes' bound, with the latencies of load and store."""
    trace = Case(6, 5120, 384, 288, 6).run(2).trace
    for core in (0, 1):
        assert trace.count("nc_matmul", core) == 20 * 2 * 3 + 1 + 40 * 3 + 2 * 3 + 20 * 3
        assert trace.count("sendrecv", core) == 5
    bound = max(trace.dma_bytes(core) for core in (0, 1)) / 362_500
    assert bound == pytest.approx(19.7, abs=0.06)
    assert trace.critical_path_us() == pytest.approx(25.7, abs=0.06)
    assert trace.critical_path_us() <= 1.305 * bound
    assert trace.busy()["vector"] == pytest.approx(5.6, abs=0.06)
    assert trace.peak()["sbuf"] <= 24 * 1024
    trace = Case(5, 5120, 128, 288, 3).run(2).trace
    assert trace.critical_path_us() == pytest.approx(24.4, abs=0.06)


@pytest.mark.parametrize("source", [module, exchange, shared_expert, slots])
def test_lint(source):
    assert lint(source.__file__) == []
