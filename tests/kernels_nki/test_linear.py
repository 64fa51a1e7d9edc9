# SPDX-License-Identifier: Apache-2.0
"""The linear kernel against rows.linear: bf16, fp32 and fp8_exact weights."""

import ml_dtypes
import numpy as np
import pytest
import torch
from comparing import CORES, arithmetic, array, close, normal
from nki_emulator import Result, lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41 import rows as reference
from modeling_deepseek_v41.errors import CheckpointError
from modeling_deepseek_v41.formats import qdq_fp8
from modeling_deepseek_v41.fp8_exact import ExactRows, decode_codes
from modeling_deepseek_v41.kernels.nki import fold, linear_layout
from modeling_deepseek_v41.kernels.nki import linear as module

FORMATS = pytest.mark.parametrize("kind", ["bf16", "fp32", "exact"])
NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")


class Case:
    """Random rows and weights. Rounded results come from sums that are exact in any order: small multiples of powers of two."""

    def __init__(self, rows: int, k: int, n: int, kind: str = "bf16", quantize: bool = False, rounds: bool = False):
        self.n, self.kind, self.quantize, self.rounds = n, kind, quantize, rounds
        self.x = (normal(rows, k) * 4).bfloat16()
        if rounds:
            self.x = (normal(rows, k) * 8).round().clamp(-15, 15).bfloat16()
        self.scale = None
        if kind == "exact":
            draw = torch.Generator().manual_seed(1)
            codes = torch.randint(0x38, 0x50, (n, k), generator=draw, dtype=torch.uint8)
            codes |= torch.randint(2, (n, k), generator=draw, dtype=torch.uint8) << 7
            base = torch.randint(-6, -3, (n,), generator=draw, dtype=torch.int16)
            self.stored = ExactRows(codes, base, torch.ones(n, dtype=torch.bool))
            self.weight = torch.ldexp(decode_codes(codes), base[:, None])
        else:
            weight = (normal(n, k, seed=1) * 4).round() / 16 if rounds else normal(n, k, seed=1)
            self.stored = weight.bfloat16() if kind == "bf16" else weight
            self.weight = self.stored.float()

    def packed(self, cores: int) -> tuple[np.ndarray, ...]:
        if self.kind == "exact":
            codes, scale = linear_layout.pack_exact(self.stored, cores)
            return codes.numpy().view(ml_dtypes.float8_e4m3), scale.numpy()
        return (array(linear_layout.pack(self.stored, cores)),)

    def run(self, cores: int) -> Result:
        weight, *scale = self.packed(cores)
        options = {"quantize": self.quantize, "rounds": self.rounds, "cores": cores}
        return run(module.linear, array(self.x), weight, self.n, *scale, **options)

    def expected(self) -> Tensor:
        x = qdq_fp8(self.x.float()) if self.quantize else self.x.float()
        exact = arithmetic(torch.bfloat16)
        return reference.linear(x.unsqueeze(0), self.weight, self.rounds, exact)[0]

    def check(self, cores: int) -> Result:
        result = self.run(cores)
        close(result.outputs, self.expected(), torch.bfloat16 if self.rounds else torch.float32)
        return result


@CORES
@FORMATS
@pytest.mark.parametrize("rows", [1, 6, 7, 128, 131])
@pytest.mark.parametrize(("k", "n"), [(64, 40), (128, 1), (256, 33), (384, 530), (100, 7), (300, 65), (1280, 24)])
def test_tiny_shapes_with_tails(k, n, rows, kind, cores):
    Case(rows, k, n, kind).check(cores)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 128])
@pytest.mark.parametrize("k", [32, 96, 256, 320, 1280])
def test_quantised_and_rounded(k, rows, cores):
    Case(rows, k, 70, quantize=True).check(cores)
    Case(rows, k, 70, rounds=True).check(cores)


RELEASE = {
    "wq_a and wkv": (5120, 1792, "bf16", True), "wq_b": (1280, 4096, "bf16", True), "wo_a": (4096, 1024, "bf16", True),
    "wo_b": (1024, 5120, "bf16", True), "head": (5120, 2020, "bf16", False),
    "router": (5120, 384, "bf16", False), "fn": (20480, 24, "fp32", False), "exact": (5120, 576, "exact", True),
}  # fmt: skip


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 128])
@pytest.mark.parametrize("name", RELEASE)
def test_release_shapes(name, rows, cores):
    k, n, kind, quantize = RELEASE[name]
    Case(rows, k, n, kind, quantize).check(cores)


@pytest.mark.slow
def test_many_rows():
    Case(4096, 1280, 512).check(2)


@CORES
@pytest.mark.parametrize("k", [100, 300])
def test_what_fills_up_is_not_read(k, cores):
    """NaN in the weight's padding changes nothing."""
    case = Case(6, k, 33)
    weight = case.packed(cores)[0].copy()
    hole = array(linear_layout.pack(torch.ones(33, k, dtype=torch.bfloat16), cores)) == 0
    weight[hole] = np.nan
    found = run(module.linear, array(case.x), weight, columns=33, rounds=False, cores=cores).outputs
    np.testing.assert_array_equal(found, case.run(cores).outputs)


def test_refusals():
    case = Case(2, 64, 40)
    x, weight = array(case.x), case.packed(1)[0]
    for arguments, options, text in (
        ((x, weight), {"columns": 41}, r"expected \(1, 64, 41\) for 64 x 41, found \(1, 64, 40\)"),
        ((x.astype(np.float32), weight), {"columns": 40}, "x float32 with weight bfloat16"),
        ((x.astype(np.float32), weight.astype(np.float32)), {"columns": 40, "quantize": True}, "x is float32"),
        ((x[:, :40], weight[:, :40]), {"columns": 40, "quantize": True}, r"\(2, 40\), columns no multiple of 32"),
        ((x, weight, 40, np.ones((1, 39), np.float32)), {}, r"scale: expected \(1, 40\), found \(1, 39\)"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(module.linear, *arguments, **options)
    rows = Case(2, 64, 40, "exact").stored
    with pytest.raises(CheckpointError, match="1 of 40 rows"):
        linear_layout.pack_exact(rows._replace(exact=torch.arange(40) != 3), 1)


@NO_TRACE
@pytest.mark.parametrize(
    ("name", "matmuls", "transposes", "critical", "ratio", "beyond_latency"),
    [
        ("wq_a and wkv", 80, 2, 31.7, 1.25, 1.10), ("wq_b", 40, 1, 20.8, 1.44, 1.16), ("wo_a", 32, 2, 17.8, 1.54, 1.19),
        ("wo_b", 40, 1, 21.0, 1.45, 1.17), ("head", 80, 2, 35.3, 1.24, 1.10), ("router", 40, 2, 11.2, 2.06, 1.33),
        ("fn", 160, 8, 10.8, 3.98, 2.51), ("exact", 40, 2, 13.6, 3.34, 2.36),
    ],
)  # fmt: skip
def test_cost(name, matmuls, transposes, critical, ratio, beyond_latency):
    """The docstring's figures: the time, its ratio to the memory's bound, and that without the 4 us of first load and store."""
    k, n, kind, quantize = RELEASE[name]
    trace = Case(6, k, n, kind, quantize).run(2).trace
    bound = k * n / 2 * {"bf16": 2, "fp32": 4, "exact": 1}[kind] / 362_500
    for core in (0, 1):
        assert trace.count("nc_matmul", core) == matmuls and trace.count("nc_transpose", core) == transposes
    assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
    assert trace.critical_path_us() / bound == pytest.approx(ratio, abs=0.01)
    assert (trace.critical_path_us() - 4) / bound == pytest.approx(beyond_latency, abs=0.01)
    busy = trace.busy()
    assert busy["vector"] < 0.5 * busy["dma"] or kind != "bf16"
    assert trace.peak()["sbuf"] <= 40 * 1024 and trace.peak()["psum"] <= 4 * 1024


@NO_TRACE
def test_cost_of_128_rows():
    case = Case(128, 5120, 1792)
    trace = case.run(2).trace
    assert trace.count("nc_matmul", 0) == 80
    assert trace.critical_path_us() == pytest.approx(37.3, abs=0.1)
    assert trace.peak()["sbuf"] <= 60 * 1024


@pytest.mark.parametrize("source", [module, fold])
def test_lint(source):
    assert lint(source.__file__) == []
