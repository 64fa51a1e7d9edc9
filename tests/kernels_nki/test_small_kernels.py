# SPDX-License-Identifier: Apache-2.0
"""SwiGLU, engram gate and compressor pooling against the package's functions."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41 import experts, linear
from modeling_deepseek_v41.engram.layer import Engram
from modeling_deepseek_v41.formats import qdq_fp8
from modeling_deepseek_v41.kernels.nki import compress_pool, engram_gate, swiglu

EPS, LIMIT = 1e-20, 10.0
ROWS = pytest.mark.parametrize("rows", [1, 6, 7, 128, 131])
NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")


def routing_of(rows: int) -> Tensor:
    return normal(rows, 1, seed=5).sigmoid()


@CORES
@DTYPES
@ROWS
@pytest.mark.parametrize(("columns", "limit"), [(288, LIMIT), (33, LIMIT), (64, 0.0), (5000, LIMIT)])
def test_swiglu(columns, limit, rows, dtype, cores):
    gate_up, routing = (normal(rows, 2 * columns) * 8).to(dtype), routing_of(rows)
    plain = arithmetic(torch.float32)
    for given in (routing, None):
        arguments = (array(gate_up), *(() if given is None else (array(given),)))
        found = run(swiglu.swiglu, *arguments, limit=limit, cores=cores).outputs
        expected = experts.swiglu(gate_up.float(), None if given is None else given[:, 0], limit, plain)
        close(found, expected.to(dtype).float(), dtype)


@CORES
@ROWS
def test_swiglu_quantised(rows, cores):
    """The QDQ is that of the kernel's own result, to the bit."""
    gate_up, routing = (normal(rows, 2 * 288) * 8).bfloat16(), routing_of(rows)
    arguments = (array(gate_up), array(routing), LIMIT)
    plain = run(swiglu.swiglu, *arguments, cores=cores).outputs
    found = run(swiglu.swiglu, *arguments, quantize=True, cores=cores).outputs
    assert torch.equal(torch.from_numpy(found.astype("f4")), qdq_fp8(torch.from_numpy(plain.astype("f4"))))


def gated(x: Tensor, key: Tensor, value: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Engram.forward of an instance that has the weights only."""
    layer = Engram.__new__(Engram)
    torch.nn.Module.__init__(layer)
    layer.q_weight, layer.k_weight = torch.nn.Parameter(weight), torch.nn.Parameter(torch.ones_like(weight))
    layer.eps, layer.arithmetic = EPS, arithmetic(dtype)
    kv = torch.cat([key, value.unsqueeze(-2)], -2).float()
    return layer(x.float().unsqueeze(0), kv.unsqueeze(0))[0].detach()


@CORES
@DTYPES
@ROWS
@pytest.mark.parametrize(("hc", "dim"), [(4, 64), (1, 33), (3, 128)])
def test_engram_gate(hc, dim, rows, dtype, cores):
    x, key, value = (
        normal(rows, hc, dim).to(dtype),
        normal(rows, hc, dim, seed=1).to(dtype),
        normal(rows, dim, seed=2).to(dtype),
    )
    weight = normal(hc, dim, seed=3)
    found = run(engram_gate.engram_gate, *map(array, (x, key, value, weight)), EPS, cores=cores).outputs
    close(found, gated(x, key, value, weight, dtype), dtype)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 128])
def test_engram_gate_at_release_shape(rows, cores):
    x, key, value = (normal(rows, *shape, seed=i).bfloat16() for i, shape in enumerate([(4, 5120), (4, 5120), (5120,)]))
    weight = normal(4, 5120, seed=3)
    found = run(engram_gate.engram_gate, *map(array, (x, key, value, weight)), EPS, cores=cores).outputs
    close(found, gated(x, key, value, weight, torch.bfloat16), torch.bfloat16)


def pooled(kv: Tensor, score: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Compressor.forward behind its linears."""
    rounding = arithmetic(dtype)
    latent = rounding.round((kv * score.softmax(1)).sum(1))
    return linear.rms_norm(latent, weight[0], EPS, rounding)


@CORES
@DTYPES
@pytest.mark.parametrize("groups", [1, 2, 7, 130])
@pytest.mark.parametrize(("ratio", "dim"), [(2, 64), (4, 512), (128, 512), (1, 33), (5, 96)])
def test_compress_pool(ratio, dim, groups, dtype, cores):
    if ratio == 128 and groups == 130:
        groups = 9
    kv, score, weight = normal(groups, ratio, dim), normal(groups, ratio, dim, seed=1) * 8, normal(1, dim, seed=2)
    rounds = dtype == torch.bfloat16
    arrays = map(array, (kv, score, weight))
    found = run(compress_pool.compress_pool, *arrays, EPS, rounds=rounds, cores=cores).outputs
    close(found, pooled(kv, score, weight, dtype), dtype, inner=2e-3)


def test_refusals():
    a = {"x": normal(2, 4, 8), "v": normal(2, 8), "w": normal(4, 8), "one": normal(1, 8)}
    a = {name: array(value) for name, value in a.items()}
    for kernel, arguments, options, text in (
        (swiglu.swiglu, (a["one"][:, :7],), {}, r"gate_up \(1, 7\): two halves"),
        (swiglu.swiglu, (a["one"], a["v"][:, :1]), {}, r"routing \(2, 1\), expected \(1, 1\)"),
        (swiglu.swiglu, (a["one"],), {"quantize": True}, "4 columns are no multiple of 32"),
        (swiglu.swiglu, (array(normal(1, 64)),), {"quantize": True}, "gate_up is float32"),
        (engram_gate.engram_gate, (a["x"], a["x"][:, :3], a["v"], a["w"], EPS), {}, r"key \(2, 3, 8\), expected \(2, 4, 8\)"),
        (engram_gate.engram_gate, (a["x"], a["x"], a["one"], a["w"], EPS), {}, r"value \(1, 8\), expected \(2, 8\)"),
        (engram_gate.engram_gate, (a["x"], a["x"], a["v"], a["one"], EPS), {}, r"weight \(1, 8\), expected \(4, 8\)"),
        (compress_pool.compress_pool, (a["x"], a["x"][:, :3], a["one"], EPS), {}, r"score \(2, 3, 8\), expected \(2, 4, 8\)"),
        (compress_pool.compress_pool, (a["x"], a["x"], a["w"], EPS), {}, r"weight \(4, 8\), expected \(1, 8\)"),
        (
            compress_pool.compress_pool,
            (array(normal(1, 9, 1009)),) * 2 + (array(normal(1, 1009)), EPS),
            {},
            "9 streams of 1009",
        ),
    ):
        with pytest.raises(AssertionError, match=text):
            run(kernel, *arguments, **options)


@NO_TRACE
def test_cost():
    bf16 = torch.bfloat16
    streams, value, weight = normal(6, 4, 5120).to(bf16), normal(6, 5120).to(bf16), normal(4, 5120)
    gate_up, routing = normal(6, 576).to(bf16), normal(6, 1)
    of_norm = {
        "activation": 2, "dma_copy": 2, "nc_matmul": 2, "scalar_tensor_tensor": 1, "shared_identity_matrix": 1,
        "tensor_copy": 2, "tensor_scalar": 2,
    }  # fmt: skip
    of_pool = {"activation": 1, "dma_copy": 2, "reciprocal": 1, "tensor_reduce": 3, "tensor_tensor": 3}
    of_pool = {name: of_norm.get(name, 0) + of_pool.get(name, 0) for name in {*of_norm, *of_pool}}
    of_gate = {
        "activation": 13, "dma_copy": 5, "nc_matmul": 2, "scalar_tensor_tensor": 5, "shared_identity_matrix": 1,
        "tensor_copy": 2, "tensor_reduce": 1, "tensor_scalar": 3, "tensor_tensor": 4,
    }  # fmt: skip
    of_swiglu = {
        "activation": 1, "dma_copy": 3, "scalar_tensor_tensor": 3, "tensor_reduce": 1, "tensor_scalar": 8, "tensor_tensor": 1,
    }  # fmt: skip
    for kernel, tensors, options, counts, critical in (
        (swiglu.swiglu, (gate_up, routing, LIMIT), {"quantize": True}, of_swiglu, 5.7),
        (engram_gate.engram_gate, (streams, streams, value, weight, EPS), {}, of_gate, 14.2),
        (compress_pool.compress_pool, (normal(2, 2, 512), normal(2, 2, 512), normal(1, 512), EPS), {}, of_pool, 6.3),
        (compress_pool.compress_pool, (normal(2, 128, 512), normal(2, 128, 512), normal(1, 512), EPS), {}, of_pool, 41.8),
    ):
        arguments = [array(one) if isinstance(one, Tensor) else one for one in tensors]
        trace = run(kernel, *arguments, cores=2, **options).trace
        assert trace.counts(0) == counts
        assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
        assert trace.peak()["sbuf"] <= 200 * 1024


@pytest.mark.parametrize("source", [swiglu, engram_gate, compress_pool], ids=lambda one: one.__name__.rsplit(".", 1)[-1])
def test_lint(source):
    assert lint(source.__file__) == []
