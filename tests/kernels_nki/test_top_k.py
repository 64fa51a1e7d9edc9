# SPDX-License-Identifier: Apache-2.0
"""The top-k kernel against topk.top_ascending, bit for bit."""

import pytest
import torch
from comparing import CORES, DTYPES, array, normal, tensor
from nki_emulator import lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41.kernels.nki import threshold
from modeling_deepseek_v41.kernels.nki import top_k as module
from modeling_deepseek_v41.topk import top_ascending

kernel = module.top_k


def check(scores: Tensor, visible: Tensor, k: int, cores: int) -> None:
    """The kernel's positions are the reference's; what is not visible is NaN for the kernel."""
    expected = top_ascending(scores.float(), visible, k)
    hidden = scores.masked_fill(~visible, torch.nan)
    found = tensor(run(kernel, array(hidden), array(visible.to(torch.uint8)), cores=cores, k=k).outputs)
    assert found.dtype == torch.int32 and torch.equal(found.long(), expected)


def some(rows: int, n: int, seed: int = 0) -> Tensor:
    """Visible positions: all, none, a prefix, single ones, by row."""
    visible = torch.rand(rows, n, generator=torch.Generator().manual_seed(seed)) < 0.8
    visible[0] = True
    visible[rows // 2, n // 3 :] = False
    if rows > 2:
        visible[1] = False
        visible[2] = torch.arange(n) == n - 1
    return visible


@CORES
@DTYPES
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 128, 1), (6, 256, 30), (7, 1280, 200), (5, 512, 512), (3, 128, 256), (3, 256, 131)]
)
def test_random_scores(rows, n, k, dtype, cores):
    check(normal(rows, n).to(dtype), some(rows, n), k, cores)


@CORES
@DTYPES
def test_ties_and_signs(dtype, cores):
    """Few distinct values, both zeros, all negative, all equal, extremes."""
    n, k = 512, 100
    rows = torch.stack(
        [
            torch.randint(-2, 3, (n,), generator=torch.Generator().manual_seed(0)).float(),
            torch.zeros(n).copysign(normal(n)),
            -normal(n).abs(),
            torch.full((n,), -3.0),
            torch.where(torch.arange(n) % 7 == 0, 1e38, -1e38) * normal(n, seed=1).abs(),
            normal(n, seed=2) * 1e-38,
            torch.arange(n) * 2.0**-149,
        ]
    ).to(dtype)
    for visible in (torch.ones(7, n, dtype=torch.bool), some(7, n, seed=3)):
        check(rows, visible, k, cores)


@CORES
@DTYPES
def test_all_chosen_ones_in_one_place(dtype, cores):
    """The k best lie side by side, also across a partition's end, or a partition apart."""
    n, k = 4096, 128
    rows = normal(3, n)
    rows[0, 1000 : 1000 + k] += 100
    rows[1, 5 :: n // k] += 100
    rows[2, -k:] += 100
    check(rows.to(dtype), torch.ones(3, n, dtype=torch.bool), k, cores)


@DTYPES
@pytest.mark.parametrize("rows", [1, 6])
def test_release_shape(rows, dtype):
    scores = normal(rows, 1 << 17).to(dtype)
    visible = torch.arange(1 << 17) < torch.arange(1, rows + 1)[:, None] * 20000
    check(scores, visible, 512, 2)


@pytest.mark.slow
@CORES
@DTYPES
def test_128_rows(dtype, cores):
    check(normal(128, 1 << 13).to(dtype), some(128, 1 << 13), 512, cores)


def test_refused_shapes():
    for n, k, text in ((130, 8, "n 130"), (256, 4096, "k 4096"), (256, 0, "k 0")):
        with pytest.raises(AssertionError, match=text):
            run(kernel, array(normal(2, n)), array(torch.ones(2, n, dtype=torch.uint8)), k=k)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
@DTYPES
@pytest.mark.parametrize("n", [1 << 14, 1 << 17])
def test_cost(n, dtype):
    """The budget in n: 36 us (bf16) or 51 us (fp32), and 15.5 or 48.5 us per row of a core and 131,072 scores."""
    k, rows = 512, 6
    scores, visible = normal(rows, n).to(dtype), torch.ones(rows, n, dtype=torch.uint8)
    trace = run(kernel, array(scores), array(visible), cores=2, k=k).trace
    bits, fixed, each = (16, 36, 15.5) if dtype == torch.bfloat16 else (32, 51, 48.5)
    mine, slots, tiles = rows // 2, 4, -(-n // 128 // 512)
    for core in (0, 1):
        assert trace.count("tensor_scalar_reduce", core) == mine * (bits + 1 + 1 + slots * tiles)
        assert trace.count("nc_matmul", core) == bits + 1 + mine * (3 + slots * (1 + tiles))
        assert trace.count("tensor_scalar_cumulative", core) == 2 * mine
    assert trace.critical_path_us() <= fixed + each * mine * n / (1 << 17)


@pytest.mark.slow
@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
@DTYPES
def test_memory_at_the_largest_shape(dtype):
    n, rows = 1 << 18, 9
    trace = run(kernel, array(normal(rows, n).to(dtype)), array(torch.ones(rows, n, dtype=torch.uint8)), k=2048).trace
    peak = trace.peak()
    assert peak["sbuf"] <= 200 * 1024 and peak["psum"] <= 16 * 1024, peak


def test_lint():
    assert lint(module.__file__) == [] and lint(threshold.__file__) == []
