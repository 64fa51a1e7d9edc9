# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and the collapse, alone and together, against linear.rms_norm and hyper_connections."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import lint, real_nki, run

from modeling_deepseek_v41 import hyper_connections, linear
from modeling_deepseek_v41.kernels.nki import rms_norm as module

EPS = 1e-20
NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
SHAPES = [(1, 64), (6, 5120), (7, 96), (7, 33), (128, 1536), (131, 50), (2, 512), (1, 7)]


@CORES
@DTYPES
@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_norm(rows, dim, dtype, cores):
    x, weight = (normal(rows, dim) * 3).to(dtype), normal(1, dim, seed=1)
    found = run(module.rms_norm, array(x), array(weight), EPS, cores=cores).outputs
    close(found, linear.rms_norm(x.float(), weight[0], EPS, arithmetic(dtype)), dtype)


@CORES
@DTYPES
@pytest.mark.parametrize("hc", [1, 2, 4])
@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_collapse(rows, dim, hc, dtype, cores):
    x, pre, weight = (normal(rows, hc, dim) * 3).to(dtype), normal(rows, hc, seed=2), normal(1, dim, seed=1)
    found = run(module.collapse, array(x), array(pre), array(weight), EPS, cores=cores).outputs
    expected = hyper_connections.collapse(x.float()[None], pre[None], weight[0], EPS, arithmetic(dtype))[0]
    close(found, expected, dtype)
    found = run(module.collapse_streams, array(x), array(pre), cores=cores).outputs
    close(found, hyper_connections.weighted_sum(x.float()[None], pre[None], arithmetic(dtype))[0], dtype)


@CORES
def test_a_row_of_zeros(cores):
    x = torch.zeros(3, 64)
    found = run(module.rms_norm, array(x), array(normal(1, 64)), 0.0, cores=cores).outputs
    assert not found.any()


@pytest.mark.slow
@CORES
def test_many_rows(cores):
    x, weight = normal(4096, 5120).bfloat16(), normal(1, 5120, seed=1)
    found = run(module.rms_norm, array(x), array(weight), EPS, cores=cores).outputs
    close(found, linear.rms_norm(x.float(), weight[0], EPS, arithmetic(torch.bfloat16)), torch.bfloat16)
    streams, pre = normal(512, 4, 5120).bfloat16(), normal(512, 4)
    found = run(module.collapse, array(streams), array(pre), array(weight), EPS, cores=cores).outputs
    expected = hyper_connections.collapse(streams.float()[None], pre[None], weight[0], EPS, arithmetic(torch.bfloat16))[0]
    close(found, expected, torch.bfloat16, inner=1e-3)


def test_refusals():
    x, pre, weight = array(normal(2, 4, 8)), array(normal(2, 4)), array(normal(1, 8))
    for kernel, arguments, text in (
        (module.rms_norm, (x[:, 0], weight[:, :7]), r"weight \(1, 7\), expected \(1, 8\)"),
        (module.rms_norm, (array(normal(1, 8200)), array(normal(1, 8200))), r"x \(1, 8200\): at most 8192"),
        (module.collapse, (x, pre[:, :3], weight), r"pre \(2, 3\), expected \(2, 4\)"),
        (module.collapse, (x, pre, weight[:, :7]), r"weight \(1, 7\), expected \(1, 8\)"),
        (module.collapse, (array(normal(1, 9, 1009)), array(normal(1, 9)), array(normal(1, 1009))), "9 streams of 1009"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(kernel, *arguments, EPS)
    with pytest.raises(AssertionError, match=r"pre \(2, 3\), expected \(2, 4\)"):
        run(module.collapse_streams, x, pre[:, :3])


@NO_TRACE
def test_cost():
    x, pre, weight = normal(6, 4, 5120).bfloat16(), normal(6, 4), normal(1, 5120)
    for kernel, arguments, extra, critical in (
        (module.rms_norm, (x[:, 0], weight), {}, 6.2),
        (module.collapse, (x, pre, weight), {"dma_copy": 1, "scalar_tensor_tensor": 3, "tensor_scalar": 1}, 8.15),
    ):
        trace = run(kernel, *map(array, arguments), EPS, cores=2).trace
        counts = {
            "activation": 2, "dma_copy": 3, "nc_matmul": 2, "scalar_tensor_tensor": 1, "shared_identity_matrix": 1,
            "tensor_copy": 2, "tensor_scalar": 2,
        }  # fmt: skip
        assert trace.counts(0) == {name: count + extra.get(name, 0) for name, count in counts.items()}
        assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
        assert trace.peak()["sbuf"] <= 200 * 1024
    trace = run(module.collapse_streams, array(x[:5]), array(pre[:5]), cores=2).trace
    assert trace.counts(0) == {"dma_copy": 3, "scalar_tensor_tensor": 3, "tensor_scalar": 1}
    assert trace.critical_path_us() == pytest.approx(6.8, abs=0.06)


def test_lint():
    assert lint(module.__file__) == []
