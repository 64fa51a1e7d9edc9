# SPDX-License-Identifier: Apache-2.0
"""The QDQ of index keys and queries, of compressed KV, and of window KV in fp32: the bits of formats.py."""

import numpy as np
import pytest
import torch
from comparing import CORES, array, normal
from nki_emulator import lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41.formats import qdq_fp4_e4m3, qdq_fp4_ue8m0, qdq_fp8
from modeling_deepseek_v41.kernels.nki import compressed_qdq, group_qdq

SHAPES = pytest.mark.parametrize(("rows", "columns"), [(1, 32), (6, 4096), (7, 96), (128, 512), (131, 64)])
NO_TRACE = pytest.mark.skipif(real_nki(), reason="real nki gives no trace")


def wide(rows: int, columns: int) -> Tensor:
    """Values of many magnitudes, a group of zeros, and an amax that a scale divides without a rest."""
    x = normal(rows, columns) * torch.exp(normal(rows, columns // 16, seed=1) * 5).repeat_interleave(16, 1)
    x[0, :32], x[-1, 0] = 0.0, 6.0 * 2**40
    return x


def same(found: np.ndarray, expected: Tensor) -> None:
    assert torch.equal(torch.from_numpy(found.view(np.int32)), expected.contiguous().view(torch.int32))


@CORES
@SHAPES
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16 values", "fp32 values"])
def test_group_qdq(rows, columns, bf16, cores):
    x = wide(rows, columns)
    x = x.bfloat16().float() if bf16 else x
    for fp4, reference in ((True, qdq_fp4_ue8m0), (False, qdq_fp8)):
        same(run(group_qdq.group_qdq, array(x), fp4, cores=cores).outputs, reference(x))


@pytest.mark.parametrize("fp4", [True, False])
def test_group_qdq_at_every_edge(fp4):
    """Halfway points, the scales' steps and their fp32 neighbours, at every exponent that a cache may have."""
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0, 3.0, 1.0, 0.5]) * (1 if fp4 else 1.0625)
    power = torch.ldexp(torch.ones(120), torch.arange(120) - 60)[:, None]
    x = torch.cat([steps * power, torch.nextafter(steps, steps * 2) * power, torch.nextafter(steps, steps * 0) * power], 1)
    groups = torch.cat([x, -x[:, :28]], 1)
    same(run(group_qdq.group_qdq, array(groups), fp4, cores=2).outputs, (qdq_fp4_ue8m0 if fp4 else qdq_fp8)(groups))


@CORES
@SHAPES
def test_compressed_qdq(rows, columns, cores):
    x = wide(rows, columns).clamp(-3e4, 3e4).bfloat16().float()
    same(run(compressed_qdq.compressed_qdq, array(x), cores=cores).outputs, qdq_fp4_e4m3(x))


def test_compressed_qdq_at_every_edge():
    """Every halfway point times every scale, where bf16 holds it, and its bf16 neighbours."""
    mantissas = 1 + torch.arange(8) / 8
    scales = (mantissas * torch.ldexp(torch.ones(12), torch.arange(12) - 6)[:, None]).flatten()
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    exact = (scales[:, None] * halfway).bfloat16()
    bits = exact.view(torch.int16)
    groups = torch.cat([bits.view(torch.bfloat16).float(), (bits - 1).view(torch.bfloat16).float()], 1)
    groups = torch.cat([groups, 6 * scales[:, None], -(bits[:, :1] + 1).view(torch.bfloat16).float()], 1)
    assert groups.shape[1] == 16
    same(run(compressed_qdq.compressed_qdq, array(groups), cores=2).outputs, qdq_fp4_e4m3(groups))


def test_compressed_qdq_of_fp32_values():
    """All but values within two ulp of a halfway point."""
    x = normal(64, 4096)
    found = torch.from_numpy(run(compressed_qdq.compressed_qdq, array(x), cores=2).outputs)
    assert (found != qdq_fp4_e4m3(x)).float().mean() < 1e-4


def test_refusals():
    for kernel, options in ((group_qdq.group_qdq, {"fp4": True}), (compressed_qdq.compressed_qdq, {})):
        with pytest.raises(AssertionError, match="expected float32"):
            run(kernel, array(normal(1, 32).bfloat16()), **options)
        with pytest.raises(AssertionError, match=r"x \[2, 40\]: the columns are no multiple"):
            run(kernel, array(normal(2, 40)), **options)


@NO_TRACE
def test_cost():
    of_group = {"dma_copy": 2, "scalar_tensor_tensor": 3, "tensor_reduce": 1, "tensor_scalar": 5, "tensor_tensor": 2}
    of_compressed = {
        "activation": 1, "dma_copy": 2, "memset": 2, "scalar_tensor_tensor": 9, "tensor_reduce": 1, "tensor_scalar": 12,
        "tensor_tensor": 10,
    }  # fmt: skip
    for kernel, shape, options, counts, critical in (
        (group_qdq.group_qdq, (192, 128), {"fp4": True}, of_group, 6.7),
        (compressed_qdq.compressed_qdq, (6, 512), {}, of_compressed, 7.9),
    ):
        trace = run(kernel, array(normal(*shape)), cores=2, **options).trace
        assert trace.counts(0) == counts
        assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)
        assert trace.peak()["sbuf"] <= 200 * 1024


@pytest.mark.parametrize("source", [group_qdq, compressed_qdq], ids=lambda one: one.__name__.rsplit(".", 1)[-1])
def test_lint(source):
    assert lint(source.__file__) == []
