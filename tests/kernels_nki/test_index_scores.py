# SPDX-License-Identifier: Apache-2.0
"""The index score kernel against indexer.index_scores."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import lint, real_nki, run

from modeling_deepseek_v41.indexer import index_scores
from modeling_deepseek_v41.kernels.nki import index_scores as module

kernel = module.index_scores


class Case:
    """Random inputs; keys of other slots and behind ``count`` are NaN."""

    def __init__(self, rows: int, heads: int, dim: int, count: int, dtype: torch.dtype, capacity: int | None = None):
        self.dtype, self.count = dtype, count
        self.query = normal(rows, heads, dim).to(dtype)
        self.weights = (normal(rows, heads, seed=1) * (dim * heads) ** -0.5).to(dtype)
        self.keys = torch.full((3, dim, capacity or count + 5), torch.nan, dtype=dtype)
        self.keys[1, :, :count] = normal(dim, count, seed=2).to(dtype)

    def run(self, cores: int):
        inputs = [array(one) for one in (self.query, self.weights, self.keys, torch.tensor([[1]], dtype=torch.int32))]
        return run(kernel, *inputs, cores=cores, count=self.count)

    def expected(self) -> torch.Tensor:
        return index_scores(self.query.float(), self.weights, self.keys, torch.tensor([1]), self.count, arithmetic(self.dtype))


@DTYPES
@CORES
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "count"), [(1, 4, 32, 7), (6, 3, 64, 530), (7, 32, 128, 2100), (2, 128, 128, 512)]
)
def test_tiny_shapes_with_tails(rows, heads, dim, count, cores, dtype):
    case = Case(rows, heads, dim, count, dtype)
    close(case.run(cores).outputs, case.expected(), dtype, inner=2.0**-11)


@CORES
def test_release_shape(cores):
    case = Case(6, 32, 128, 1 << 14, torch.bfloat16)
    close(case.run(cores).outputs, case.expected(), torch.bfloat16, inner=2.0**-11)


@pytest.mark.slow
@CORES
@DTYPES
def test_128_rows(dtype, cores):
    case = Case(128, 32, 128, 1 << 12, dtype)
    close(case.run(cores).outputs, case.expected(), dtype, inner=2.0**-11)


@CORES
def test_a_key_that_was_never_written_spoils_its_own_score_only(cores):
    case = Case(6, 4, 32, 600, torch.bfloat16)
    whole = case.run(cores).outputs.astype("float32")
    case.keys[1, 3, 17] = torch.nan
    spoiled = case.run(cores).outputs.astype("float32")
    spoiled[:, 17] = whole[:, 17]
    assert (spoiled == whole).all()


def test_refused_shapes():
    for change, text in (
        ({"rows": 129}, "129"),
        ({"heads": 129}, "129"),
        ({"dim": 256}, "256"),
        ({"capacity": 20}, "count 64"),
    ):
        sizes = {"rows": 2, "heads": 2, "dim": 32, "count": 64, "dtype": torch.float32} | change
        with pytest.raises(AssertionError, match=text):
            case = Case(**(sizes | {"count": min(64, sizes.get("capacity", 64))}))
            case.count = 64
            case.run(1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
@pytest.mark.parametrize("count", [1 << 13, 1 << 15])
def test_cost(count):
    """The budget in n: 11 us and 0.85 us per 1,024 groups (6 rows, two cores); no engine is busy for longer than the PE."""
    trace = Case(6, 32, 128, count, torch.bfloat16).run(2).trace
    for core in (0, 1):
        assert trace.count("nc_matmul", core) == 2 * 2 * count // 2 // 512
        assert trace.count("activation", core) == 2 * count // 2 // 512
    busy, peak = trace.busy(), trace.peak()
    assert trace.critical_path_us() <= 11 + 0.85 * count / 1024
    assert max(busy.values()) <= 1.01 * busy["tensor"]
    assert peak["sbuf"] <= 200 * 1024 and peak["psum"] <= 16 * 1024, peak


def test_lint():
    assert lint(module.__file__) == []
