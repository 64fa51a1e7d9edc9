# SPDX-License-Identifier: Apache-2.0
"""The candidate block kernel against docs/model.md, section 6, in PyTorch, bit for bit."""

import pytest
import torch
from comparing import CORES, DTYPES, array, normal, tensor
from nki_emulator import lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41.kernels.nki import candidate_blocks as module
from modeling_deepseek_v41.topk import top_positions

kernel = module.candidate_blocks


def reference(scores: Tensor, seen: Tensor, size: int, most: int) -> Tensor:
    """The blocks [rows, n / size] with the highest visible scores, the newest one first; lower numbers first among equals."""
    hidden = scores.masked_fill(torch.arange(scores.shape[1]) >= seen, -torch.inf)
    best = hidden.unflatten(-1, (-1, size)).amax(-1)
    pinned = best.masked_fill(torch.arange(best.shape[1]) == torch.where(seen > 0, (seen - 1) // size, -1), torch.inf)
    chosen = top_positions(pinned, min(most, best.shape[1]))
    return torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True) & (pinned > -torch.inf)


def launch(scores: Tensor, seen: Tensor, size: int, most: int, cores: int):
    visible = torch.arange(scores.shape[1]) < seen
    newest = torch.where(seen > 0, (seen - 1) // size, -1).float()
    hidden = scores.masked_fill(~visible, torch.nan)
    return run(kernel, array(hidden), array(visible.to(torch.uint8)), array(newest), cores=cores, size=size, most=most)


def check(scores: Tensor, seen: Tensor, size: int, most: int, cores: int) -> None:
    expected = reference(scores.float(), seen, size, most)
    found = tensor(launch(scores, seen, size, most, cores).outputs)
    assert torch.equal(found.bool(), expected)


@CORES
@DTYPES
@pytest.mark.parametrize(("n", "size", "most"), [(512, 4, 5), (1024, 8, 128), (1024, 2, 700), (128, 1, 3)])
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_tiny_shapes(rows, n, size, most, dtype, cores):
    """Nothing visible, one group, a part of a block, everything; scores with ties."""
    seen = torch.tensor([n, 0, 1, size, size + 1, n // 2, n - 1])[:rows, None]
    check(normal(rows, n).to(dtype), seen, size, most, cores)
    check(normal(rows, n).round().to(dtype), seen, size, most, cores)


@DTYPES
def test_release_shape(dtype):
    rows, n = 6, 1 << 17
    check(normal(rows, n).to(dtype), torch.arange(1, rows + 1)[:, None] * 20003, 8, 2048, 2)


@pytest.mark.slow
@CORES
@DTYPES
def test_128_rows(dtype, cores):
    check(normal(128, 1 << 13).to(dtype), torch.arange(128)[:, None] * 64, 8, 100, cores)


def test_refused_shapes():
    with pytest.raises(AssertionError, match="n 640"):
        launch(normal(1, 640), torch.tensor([[3]]), 8, 4, 1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
@DTYPES
@pytest.mark.parametrize("n", [1 << 14, 1 << 17])
def test_cost(n, dtype):
    """The budget in n: 24.5 us (bf16) or 41.5 us (fp32), and 5 or 9.5 us per row of a core and 131,072 scores."""
    rows, size = 6, 8
    trace = launch(normal(rows, n).to(dtype), torch.full((rows, 1), n), size, 2048, 2).trace
    bits, fixed, each = (16, 24.5, 5) if dtype == torch.bfloat16 else (32, 41.5, 9.5)
    for core in (0, 1):
        assert trace.count("tensor_scalar_reduce", core) == 3 * (bits + 2)
        assert trace.count("select_reduce", core) == trace.count("tensor_reduce", core) == 3
    peak = trace.peak()
    assert trace.critical_path_us() <= fixed + each * 3 * n / (1 << 17)
    assert peak["sbuf"] <= 200 * 1024 and peak["psum"] <= 16 * 1024, peak


def test_lint():
    assert lint(module.__file__) == []
