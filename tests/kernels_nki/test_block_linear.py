# SPDX-License-Identifier: Apache-2.0
"""The block-scaled fp8 linear against rows.linear with the decoded weight."""

import ml_dtypes
import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, close, normal
from nki_emulator import Result, lint, real_nki, run

from modeling_deepseek_v41 import rows as reference
from modeling_deepseek_v41.errors import CheckpointError
from modeling_deepseek_v41.formats import decode_fp8, qdq_fp8
from modeling_deepseek_v41.kernels.nki import block_linear as module
from modeling_deepseek_v41.kernels.nki import linear_layout


class Case:
    """Weights up to 448 in every other block; without odd subnormals where ``exact``."""

    def __init__(self, rows: int, k: int, n: int, quantize: bool = False, exact: bool = True):
        self.n, self.quantize = n, quantize
        self.x = normal(rows, k).bfloat16()
        weight = (normal(n, k, seed=1) * 100).clamp(-448, 448)
        weight = (
            torch.where(weight.abs() < 0.05, 0.0, weight)
            if exact
            else (weight * 4).clamp(-448, 448) * 2.0 ** (-normal(n, k, seed=2).abs() * 8)
        )
        self.weight = weight.to(torch.float8_e4m3fn)
        self.scale = torch.randint(100, 140, (n // 32, k // 32), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)

    def packed(self, cores: int) -> linear_layout.BlockWeight:
        return linear_layout.pack_blocks(self.weight, self.scale, cores)

    def run(self, cores: int, rounds: bool = False) -> Result:
        packed = self.packed(cores)
        codes = packed.codes.numpy().view(ml_dtypes.float8_e4m3)
        arrays = array(self.x), codes, array(packed.scale)
        return run(module.block_linear, *arrays, self.n, quantize=self.quantize, rounds=rounds, cores=cores)

    def check(self, cores: int) -> Result:
        assert self.packed(cores).inexact == 0
        result = self.run(cores)
        x = qdq_fp8(self.x.float()) if self.quantize else self.x.float()
        weight = decode_fp8(self.weight, self.scale)
        close(result.outputs, reference.linear(x.unsqueeze(0), weight, False, arithmetic(torch.bfloat16))[0], torch.float32)
        return result


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 32, 33])
@pytest.mark.parametrize(("k", "n"), [(32, 32), (64, 96), (128, 128), (160, 320), (384, 288), (1280, 64)])
def test_tiny_shapes_with_tails(k, n, rows, cores):
    Case(rows, k, n).check(cores)
    Case(rows, k, n, quantize=True).check(cores)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7])
@pytest.mark.parametrize(("k", "n"), [(5120, 1792), (1024, 5120)])
def test_release_shapes(k, n, rows, cores):
    Case(rows, k, n, quantize=True).check(cores)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [128, 4096])
def test_many_rows(rows):
    """In passes of 32."""
    Case(rows, 160, 128).check(2)


def test_rounded():
    case = Case(6, 128, 128)
    plain = case.run(1).outputs
    np.testing.assert_array_equal(case.run(1, rounds=True).outputs, plain.astype(ml_dtypes.bfloat16))


def test_inexact_weights_are_counted():
    """A halved block's odd subnormals lose 2^-10, half of the least step, before the scale."""
    case = Case(6, 128, 128, exact=False)
    packed = case.packed(1)
    decoded = packed.codes.view(torch.float8_e4m3fn).float().permute(0, 2, 1).reshape(128, 128)
    scale = packed.scale[0].float().permute(2, 1, 0).reshape(4, 4).repeat_interleave(32, 0).repeat_interleave(32, 1)
    error = (decoded * scale - decode_fp8(case.weight, case.scale)).abs()
    assert 0 < packed.inexact == int((error > 0).sum()) < 128 * 128 // 10
    assert (error <= scale * 2.0**-10).all() and decoded.abs().max() <= linear_layout.LARGEST


@CORES
def test_what_fills_up_is_not_read(cores):
    """NaN in the padding of k and of the columns changes nothing."""
    case = Case(6, 160, 96)
    packed = case.packed(cores)
    hole = linear_layout.pack_blocks(torch.ones(96, 160).to(torch.float8_e4m3fn), case.scale, cores).codes == 0
    codes = packed.codes.masked_fill(hole, 0xFF).numpy().view(ml_dtypes.float8_e4m3)
    found = run(
        module.block_linear, array(case.x), codes, array(packed.scale), 96, quantize=False, rounds=False, cores=cores
    ).outputs
    np.testing.assert_array_equal(found, case.run(cores).outputs)


def test_refusals():
    case = Case(2, 64, 32)
    packed = case.packed(1)
    x, codes, scale = array(case.x), packed.codes.numpy().view(ml_dtypes.float8_e4m3), array(packed.scale)
    for arguments, text in (
        ((x.astype(np.float32), codes, scale, 32), "expected bfloat16, found float32"),
        ((x, codes, scale, 33), "64 x 33: expected multiples of 32"),
        ((x, codes, scale, 64), r"weight: expected \(1, 64, 64\) for 64 x 64, found \(1, 64, 32\)"),
        ((x, codes, scale[:, :2], 32), r"scale: expected \(1, 4, 1, 1\), found \(1, 2, 1, 1\)"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(module.block_linear, *arguments)
    with pytest.raises(CheckpointError, match=r"\(33, 64\) is no whole number"):
        linear_layout.pack_blocks(torch.zeros(33, 64).to(torch.float8_e4m3fn), case.scale, 1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The docstring's figures: the time, its ratio to the memory's bound, and that without the 4 us of first load and store."""
    for k, n, matmuls, transposes, critical, ratio, beyond_latency in (
        (5120, 1792, 283, 9, 19.7, 1.56, 1.24), (1280, 4096, 162, 17, 14.8, 2.04, 1.49),
        (4096, 1024, 129, 6, 13.4, 2.31, 1.62), (1024, 5120, 162, 21, 14.9, 2.07, 1.51),
    ):  # fmt: skip
        trace = Case(6, k, n, quantize=True).run(2).trace
        assert trace.count("nc_matmul", 0) == matmuls and trace.count("nc_transpose", 0) == transposes
        found, bound = trace.critical_path_us(), k * n / 2 / 362_500
        assert found == pytest.approx(critical, abs=0.06) and found / bound == pytest.approx(ratio, abs=0.01)
        assert (found - 4) / bound == pytest.approx(beyond_latency, abs=0.01)
        busy = trace.busy()
        assert max(busy["tensor"], busy["vector"], busy["scalar"], busy["gpsimd"]) < busy["dma"]
        assert trace.peak()["sbuf"] <= 20 * 1024


def test_lint():
    assert lint(module.__file__) == []
