# SPDX-License-Identifier: Apache-2.0
"""Attention over rows gathered beforehand, against attention.softmax_attention and against sparse_attention."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41.attention import softmax_attention
from modeling_deepseek_v41.kernels.nki import attend
from modeling_deepseek_v41.kernels.nki import gathered_attention as module

NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")


class Case:
    """Random inputs of one call; what the bias hides is large."""

    def __init__(self, rows: int, heads: int, dim: int, keys: int, dtype: torch.dtype):
        self.dtype, self.sink = dtype, normal(heads, seed=1)
        self.q, self.kv = normal(rows, heads, dim).to(dtype), normal(rows, keys, dim, seed=2).to(dtype)
        self.valid = torch.rand(rows, keys, generator=torch.Generator().manual_seed(3)) < 0.7
        self.kv[~self.valid] = 1e3

    def expected(self) -> Tensor:
        own = self.kv.masked_fill(~self.valid.unsqueeze(-1), 0).float()
        near = own.new_zeros(0, own.shape[-1])
        return softmax_attention(self.q.float(), near, own, self.valid, self.sink, arithmetic(self.dtype))

    def run(self, cores: int):
        bias = torch.zeros(self.valid.shape).masked_fill(~self.valid, attend.HIDDEN).to(self.dtype)
        inputs = self.q, self.kv, bias, self.sink.unsqueeze(1)
        return run(module.gathered_attention, *map(array, inputs), cores=cores)


@DTYPES
@CORES
@pytest.mark.parametrize(
    "shape", [(1, 4, 32, 6), (6, 3, 32, 200), (7, 8, 128, 130), (5, 2, 256, 648), (2, 128, 64, 1), (3, 8, 64, 1024)]
)
def test_tiny_shapes_with_tails(shape, cores, dtype):
    case = Case(*shape, dtype)
    close(case.run(cores).outputs, case.expected(), dtype)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_release_shapes(rows, cores):
    case = Case(rows, 8, 512, 640, torch.bfloat16)
    close(case.run(cores).outputs, case.expected(), torch.bfloat16, inner=2.0**-11)


@pytest.mark.slow
@CORES
@DTYPES
def test_128_rows(cores, dtype):
    case = Case(128, 8, 512, 640, dtype)
    close(case.run(cores).outputs, case.expected(), dtype, inner=2.0**-11)


@CORES
def test_rows_without_a_key_give_zeros(cores):
    case = Case(4, 8, 64, 16, torch.bfloat16)
    case.valid[1] = case.valid[3] = False
    case.sink[0], case.sink[1] = 1e4, -1e4
    out = case.run(cores).outputs
    close(out, case.expected(), torch.bfloat16)
    assert not out[[1, 3]].astype("f4").any() and out[[0, 2]].astype("f4").any()


def test_refusals():
    case = Case(4, 2, 32, 16, torch.bfloat16)
    q, kv, bias, sink = array(case.q), array(case.kv), array(case.kv[:, :, 0]), array(case.sink.unsqueeze(1))
    for arguments, text in (
        ((q, kv[:3], bias, sink), r"kv \(3, 16, 32\), expected \(4, 16, 32\)"),
        ((q, kv, bias[:, :8], sink), r"bias \(4, 8\), expected \(4, 16\)"),
        ((q, kv, bias, sink[:1]), r"sink \(1, 1\), expected \(2, 1\)"),
        ((q, array(normal(4, 1032, 32).bfloat16()), bias, sink), r"kv \(4, 1032, 32\): 1 to 1024"),
        ((q, array(normal(4, 131, 32).bfloat16()), bias, sink), r"kv \(4, 131, 32\).*in 2s"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(module.gathered_attention, *arguments)


@NO_TRACE
def test_cost():
    """The docstring's figures."""
    trace = Case(6, 8, 512, 640, torch.bfloat16).run(2).trace
    chunks, pieces, queries, groups = 4, 5, 3, 2
    for core in (0, 1):
        assert trace.count("nc_transpose", core) == queries * chunks * pieces + groups * (chunks + pieces)
        assert trace.count("nc_matmul", core) == queries * (chunks + 1) * pieces + groups * 2
        assert trace.count("dma_descriptors", core) == 0
    assert trace.critical_path_us() == pytest.approx(17.3, abs=0.06)


@NO_TRACE
def test_memory_at_the_largest_shape():
    for dtype in (torch.bfloat16, torch.float32):
        peak = Case(20, 8, 512, 1024, dtype).run(1).trace.peak()
        assert peak["sbuf"] <= 200 * 1024 and peak["psum"] <= 16 * 1024, peak


def test_lint():
    assert lint(module.__file__) == []
