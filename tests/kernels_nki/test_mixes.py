# SPDX-License-Identifier: Apache-2.0
"""The hyper-connection mix kernel against hyper_connections.mixes."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41.hyper_connections import mixes
from modeling_deepseek_v41.kernels.nki import mixes as module

kernel = module.mixes
EPS, NORM_EPS = 1e-6, 1e-20


class Case:
    """Random streams, mixes and scales; ``spread`` makes the softmax sharp."""

    def __init__(self, rows: int, hc: int, dim: int, rounds: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0):
        count = (2 + hc) * hc
        self.rounds, self.dtype = rounds, dtype
        self.x = (normal(rows, hc, dim) * 3).to(dtype)
        self.raw = normal(rows, count, seed=1) * 5
        self.scale, self.base = normal(count, seed=2) * spread, normal(count, seed=3) * spread

    def run(self, cores: int):
        flat = self.x.flatten(1)
        parts = max(p for p in range(1, 129) if flat.shape[1] % p == 0)
        inputs = [self.raw, flat.unflatten(1, (parts, -1)), self.scale.unsqueeze(0), self.base.unsqueeze(0)]
        return run(kernel, *map(array, inputs), cores=cores, rounds=self.rounds, eps=EPS, norm_eps=NORM_EPS)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        x, raw = self.x.float().unsqueeze(0), self.raw.unsqueeze(0)
        found = mixes(raw, x, self.scale, self.base, self.rounds, EPS, NORM_EPS, arithmetic(self.dtype))
        return tuple(one[0] for one in found)

    def check(self, cores: int) -> None:
        for found, expected in zip(self.run(cores).outputs, self.expected(), strict=True):
            close(found, expected, torch.float32)


@CORES
@DTYPES
@pytest.mark.parametrize("rows", [1, 6, 7])
@pytest.mark.parametrize(("hc", "dim", "rounds"), [(4, 64, 19), (1, 32, 2), (2, 33, 3), (3, 50, 0)])
def test_tiny_shapes(hc, dim, rounds, rows, dtype, cores):
    Case(rows, hc, dim, rounds, dtype).check(cores)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 128])
def test_release_shape(rows, cores):
    Case(rows, 4, 5120, 19).check(cores)


def test_a_sharp_softmax():
    """Entries from 1 down to eps: the rounds then divide by sums near eps too."""
    Case(6, 4, 256, 19, spread=30.0).check(1)


def test_refused_shapes():
    for change, text in (({"rows": 129}, "129"), ({"hc": 12}, "168")):
        with pytest.raises(AssertionError, match=text):
            Case(**({"rows": 2, "hc": 4, "dim": 64, "rounds": 1} | change)).run(1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The budget: 6 us and 0.37 us per half round; 128 rows take as many instructions as one."""
    for rows in (6, 128):
        trace = Case(rows, 4, 5120, 19).run(2).trace
        for core in (0, 1):
            assert trace.count("nc_matmul", core) == 39 + 3 and trace.count("nc_transpose", core) == 2
            assert trace.count("reciprocal", core) == 39 + 1
        peak = trace.peak()
        assert peak["sbuf"] <= 200 * 1024 and peak["psum"] <= 16 * 1024, peak
        if rows == 6:
            assert trace.critical_path_us() <= 6 + 39 * 0.37


def test_lint():
    assert lint(module.__file__) == []
