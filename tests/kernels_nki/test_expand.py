# SPDX-License-Identifier: Apache-2.0
"""The mix-out of the streams against hyper_connections.expand."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import Result, lint, real_nki, run

from modeling_deepseek_v41 import hyper_connections
from modeling_deepseek_v41.kernels.nki import expand as module


class Case:
    def __init__(self, rows: int, hc: int, dim: int, dtype: torch.dtype = torch.bfloat16):
        self.dtype = dtype
        self.y, self.residual = normal(rows, dim).to(dtype), normal(rows, hc, dim, seed=1).to(dtype)
        self.post, self.comb = normal(rows, hc, seed=2).sigmoid() * 2, normal(rows, hc, hc, seed=3).softmax(-1)

    def run(self, cores: int) -> Result:
        return run(module.expand, *map(array, (self.y, self.residual, self.post, self.comb)), cores=cores)

    def check(self, cores: int) -> Result:
        result = self.run(cores)
        tensors = (one.float().unsqueeze(0) for one in (self.y, self.residual, self.post, self.comb))
        close(result.outputs, hyper_connections.expand(*tensors, arithmetic(self.dtype))[0], self.dtype)
        return result


@CORES
@DTYPES
@pytest.mark.parametrize("hc", [1, 3, 4])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (6, 640), (7, 96), (7, 33), (128, 100), (131, 50), (2, 1536), (1, 7)])
def test_tiny_shapes(rows, dim, hc, dtype, cores):
    Case(rows, hc, dim, dtype).check(cores)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 128])
def test_release_shape(rows, cores):
    Case(rows, 4, 5120).check(cores)


def test_refusals():
    for change, text in (
        ({"y": normal(3, 64)}, r"y \(3, 64\), expected \(2, 64\)"),
        ({"post": normal(2, 3)}, r"post \(2, 3\), expected \(2, 4\)"),
        ({"comb": normal(2, 4, 3)}, r"comb \(2, 4, 3\), expected \(2, 4, 4\)"),
        ({"y": normal(2, 64)}, "y float32, residual bfloat16"),
    ):
        case = Case(2, 4, 64)
        vars(case).update(change)
        with pytest.raises(AssertionError, match=text):
            case.run(1)
    with pytest.raises(AssertionError, match="127 streams of 16384 columns"):
        Case(1, 1, 16385).run(1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    trace = Case(6, 4, 5120).run(2).trace
    assert trace.counts(0) == {
        "dma_copy": 5, "nc_matmul": 7, "shared_identity_matrix": 1, "tensor_copy": 6, "tensor_tensor": 5,
    }  # fmt: skip
    assert trace.critical_path_us() == pytest.approx(6.55, abs=0.06) and trace.busy()["vector"] <= 0.14
    trace = Case(128, 4, 5120).run(2).trace
    assert trace.count("nc_matmul", 0) == 3 * (3 * 10 + 1)
    assert trace.critical_path_us() == pytest.approx(30.8, abs=0.1)


def test_lint():
    assert lint(module.__file__) == []
