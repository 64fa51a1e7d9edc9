# SPDX-License-Identifier: Apache-2.0
"""Gathered sparse attention against rope.rotate and attention.softmax_attention."""

import numpy as np
import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import RuleError, lint, real_nki, run
from rotary import table_of
from torch import Tensor

from modeling_deepseek_v41.attention import softmax_attention
from modeling_deepseek_v41.kernels.nki import attend, layout, split
from modeling_deepseek_v41.kernels.nki import sparse_attention as module
from modeling_deepseek_v41.rope import rotate

kernel = module.sparse_attention


class Case:
    """Random inputs of one call. Every row that no index names is NaN, and so are the rows behind -1."""

    def __init__(
        self, rows: int, heads: int, dim: int, window: int, own: int, selected: int, dtype: torch.dtype, seed: int = 0
    ):
        draw = torch.Generator().manual_seed(seed)
        self.dtype, self.window, self.selected = dtype, window, selected
        self.q = normal(rows, heads, dim, seed=seed).to(dtype)
        self.table = table_of(rows, min(dim // 2, 64))
        self.sink = normal(heads, seed=seed + 1)
        self.kv = normal(own, dim, seed=seed + 2).to(dtype)
        self.ring = torch.full((2 * window + 3, dim), torch.nan, dtype=dtype)
        self.ring_idxs = torch.randperm(2 * window + 3, generator=draw)[:window]
        self.ring[self.ring_idxs] = normal(window, dim, seed=seed + 3).to(dtype)
        self.ring_idxs[: window // 3] = -1
        self.near_valid = torch.rand(rows, window + own, generator=draw) < 0.7
        self.near_valid[:, : window // 3] = False
        self.far = torch.full((3 * selected + 5, dim), torch.nan, dtype=dtype)
        self.topk_idxs = torch.full((rows, selected), -1)
        for t in range(rows):
            count = selected if t == 0 else int(torch.randint(selected + 1, (1,), generator=draw))
            self.topk_idxs[t, :count] = (1 + torch.randperm(3 * selected, generator=draw)[:count]).sort().values
        used = self.topk_idxs[self.topk_idxs >= 0].unique()
        self.far[used] = normal(len(used), dim, seed=seed + 4).to(dtype)

    def expected(self, far: bool = True) -> Tensor:
        ring = self.ring[self.ring_idxs.clamp_min(0)].masked_fill((self.ring_idxs < 0)[:, None], 0)
        near, valid = torch.cat([ring, self.kv]).float(), self.near_valid
        own = None
        if far:
            own = self.far[self.topk_idxs.clamp_min(0)].masked_fill((self.topk_idxs < 0).unsqueeze(-1), 0).float()
            valid = torch.cat([valid, self.topk_idxs >= 0], -1)
        plain, table = arithmetic(self.dtype), self.table[None]
        q = rotate(self.q.float()[None], table, plain)[0]
        return rotate(softmax_attention(q, near, own, valid, self.sink, plain)[None], table, plain, back=True)[0]

    def run(self, cores: int, far: bool = True):
        bias = torch.zeros(self.near_valid.shape).masked_fill(~self.near_valid, module.HIDDEN).to(self.dtype)
        ring_idxs, topk_idxs = self.ring_idxs.int().unsqueeze(1), self.topk_idxs.int()
        inputs = [self.q, self.ring, ring_idxs, self.kv, bias, self.sink.unsqueeze(1), self.table]
        if far:
            inputs += [self.far, topk_idxs]
        return run(kernel, *(array(one) for one in inputs), cores=cores)

    def check(self, found: np.ndarray, expected: Tensor, inner: float = 1e-5) -> None:
        """Rotary columns mix two values, each of which may be rounded the other way before they are rotated back."""
        plain = expected.shape[-1] - self.table.shape[-1]
        close(found[..., :plain], expected[..., :plain], self.dtype, inner)
        close(found[..., plain:], expected[..., plain:], self.dtype, max(inner, 2.0**-8))


TINY = [(1, 4, 32, 5, 1, 6), (6, 3, 32, 15, 6, 200), (7, 8, 128, 15, 7, 130), (5, 2, 256, 130, 5, 9)]


@DTYPES
@CORES
@pytest.mark.parametrize("shape", TINY)
def test_tiny_shapes_with_tails(shape, cores, dtype):
    case = Case(*shape, dtype)
    case.check(case.run(cores).outputs, case.expected())
    case.check(case.run(cores, far=False).outputs, case.expected(far=False))


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_release_shapes(rows, cores):
    case = Case(rows, 8, 512, 127, rows, 512, torch.bfloat16)
    case.check(case.run(cores).outputs, case.expected(), inner=2.0**-11)


@pytest.mark.slow
@CORES
@DTYPES
def test_128_rows(cores, dtype):
    case = Case(128, 8, 512, 127, 128, 512, dtype)
    case.check(case.run(cores).outputs, case.expected(), inner=2.0**-11)


@CORES
def test_rows_without_a_key_give_zeros(cores):
    case = Case(4, 8, 64, 15, 4, 16, torch.bfloat16)
    case.near_valid[1] = case.near_valid[3] = False
    case.topk_idxs[1] = case.topk_idxs[3] = -1
    case.sink[0], case.sink[1] = 1e4, -1e4
    out = case.run(cores).outputs
    case.check(out, case.expected())
    assert not out[[1, 3]].astype(np.float32).any() and out[[0, 2]].astype(np.float32).any()


def test_refused_shapes():
    for change, text in (({"heads": 129}, "129"), ({"dim": 192}, "192"), ({"window": 510}, "510"), ({"selected": 513}, "513")):
        sizes = {"rows": 4, "heads": 2, "dim": 32, "window": 15, "own": 4, "selected": 16} | change
        with pytest.raises(AssertionError, match=text):
            Case(**sizes, dtype=torch.bfloat16).run(1)
    for table, text in ((table_of(3, 8), r"\(3, 2, 8\), expected \(4, 2, 8\)"), (table_of(4, 34), r"\(4, 2, 34\).*at most 32")):
        case = Case(4, 2, 32, 15, 4, 16, torch.bfloat16)
        case.table = table
        with pytest.raises(AssertionError, match=text):
            case.run(1)


def test_an_index_out_of_bounds_is_skipped_or_refused():
    """-1 is skipped; the documentation lets skip cover every index outside, so an index too large reads as zeros too."""
    case = Case(1, 2, 32, 3, 1, 4, torch.float32)
    case.topk_idxs[0, -1] = case.far.shape[0]
    try:
        out = case.run(1).outputs
    except RuleError as error:
        assert error.rule == "indirect-bounds"
    else:
        assert np.isfinite(out).all()


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The instructions that the docstring states; 6 rows x 640 take 2.9 times what their DMAs take."""
    trace = Case(6, 8, 512, 127, 6, 512, torch.bfloat16).run(2).trace
    chunks, gathers, tiles, queries, groups = 4, 4, 2, 3, 2
    for core in (0, 1):
        assert trace.count("dma_descriptors", core) == 1 + queries * gathers
        transposes = queries * chunks * gathers + groups * (chunks + tiles + gathers) + chunks * tiles
        assert trace.count("nc_transpose", core) == transposes
        assert trace.count("nc_matmul", core) == queries * (chunks + 1) * gathers + groups * (chunks + tiles + 2)
    assert trace.critical_path_us() == pytest.approx(23.3, abs=0.06)
    assert trace.critical_path_us() <= 2.9 * trace.busy()["dma"]
    assert trace.dma_bytes() <= 1.05 * (6 * 512 + 2 * 133 + 2 * 48) * 1024


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_memory_at_the_largest_shape():
    """Two full groups and those before the end, with the widest window: what 128 queries hold at a time."""
    for rows, dtype in ((39, torch.bfloat16), (25, torch.float32)):
        peak = Case(rows, 8, 512, 384, 128, 512, dtype).run(1).trace.peak()
        assert peak["sbuf"] <= 200 * 1024 and peak["psum"] <= 16 * 1024, peak


def test_lint():
    assert lint(module.__file__) == []
    assert lint(attend.__file__) == lint(layout.__file__) == lint(split.__file__) == []
