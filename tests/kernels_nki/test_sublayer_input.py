# SPDX-License-Identifier: Apache-2.0
"""The kernel of a sublayer's input against hyper_connections.sublayer_input, its Sinkhorn against float64."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal, tensor
from nki_emulator import Result, lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41 import hyper_connections
from modeling_deepseek_v41.kernels.nki import sinkhorn, stream_sums, streams_layout, sublayer_input

EPS, NORM_EPS = 1e-6, 1e-20


class Case:
    """Random streams and weights; the mixes are of order ``spread``. x, fn and the mix before are coarse: sums are exact."""

    def __init__(
        self, rows: int, hc: int, dim: int, rounds: int = 19, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0
    ):
        count = (2 + hc) * hc
        self.rounds, self.dtype, self.norm_eps = rounds, dtype, NORM_EPS
        self.x = (normal(rows, hc, dim) * 4).round().clamp(-15, 15).to(dtype)
        self.fn = (normal(count, hc * dim, seed=1) * 4).round() / 64
        self.scale, self.base = normal(count, seed=2) * spread * (hc * dim) ** -0.5, normal(count, seed=3) * spread
        self.weight, self.before = 1 + normal(1, dim, seed=4) / 4, (normal(rows, hc, seed=5) * 8).round() / 8

    def operands(self, cores: int) -> dict[str, Tensor]:
        hc = self.x.shape[1]
        scale, base = (streams_layout.by_stream(one, hc) for one in (self.scale, self.base))
        fn = streams_layout.pack_streams(self.fn, hc, cores)
        return {"x": self.x, "pre_mix": self.before, "fn": fn, "scale": scale, "base": base, "weight": self.weight}

    def run(self, cores: int, **changed: Tensor) -> Result:
        operands = self.operands(cores) | changed
        options = {"rounds": self.rounds, "eps": EPS, "norm_eps": self.norm_eps}
        return run(sublayer_input.sublayer_input, *map(array, operands.values()), cores=cores, **options)

    def expected(self) -> tuple[Tensor, ...]:
        weights = (self.fn, self.scale, self.base, self.weight[0])
        found = hyper_connections.sublayer_input(
            self.x.float()[None], self.before[None], *weights, self.rounds, EPS, self.norm_eps, arithmetic(self.dtype)
        )
        return tuple(one[0] for one in found)

    def check(self, cores: int) -> None:
        (h, *mixes), (expected, *coefficients) = self.run(cores).outputs, self.expected()
        close(h, expected, self.dtype)
        for found, one in zip(mixes, coefficients, strict=True):
            close(found, one, torch.float32)


@CORES
@DTYPES
@pytest.mark.parametrize("rows", [1, 6, 7, 43])
@pytest.mark.parametrize(("hc", "dim", "rounds"), [(4, 64, 19), (1, 32, 2), (2, 66, 3), (3, 50, 0), (4, 768, 19), (10, 12, 4)])
def test_tiny_shapes(hc, dim, rounds, rows, dtype, cores):
    """More rows than a pass takes where hc is 4 or 10; several parts of a stream, and groups of rows, where dim is 768."""
    Case(rows, hc, dim, rounds, dtype).check(cores)


@CORES
@pytest.mark.parametrize("rows", [1, 6, 7, 70])
def test_release_shape(rows, cores):
    Case(rows, 4, 5120).check(cores)


@CORES
def test_a_row_alone_has_the_bits_that_it_has_beside_others(cores):
    """All but comb, whose sums of fp32 are NumPy's here: it depends on the parts into which a row is cut."""
    case = Case(7, 4, 768)
    together = case.run(cores).outputs
    case.x, case.before = case.x[6:], case.before[6:]
    for one, every in zip(case.run(cores).outputs[:3], together[:3], strict=True):
        assert torch.equal(tensor(one)[0], tensor(every)[6])


@CORES
def test_rows_of_zeros(cores):
    case = Case(3, 4, 64)
    case.x, case.norm_eps = torch.zeros(3, 4, 64), 0.0
    h, *mixes = case.run(cores).outputs
    assert not h.any() and all(tensor(one).isfinite().all() for one in mixes)


@pytest.mark.parametrize("most", [1.0, 20.0, 100.0])
@pytest.mark.parametrize("kind", ["random", "corners", "one column", "diagonal"])
def test_sinkhorn(kind, most):
    """20 rounds of matrices from flat to as sharp as exp allows, within 1e-5 of float64. eps decides what a weak column has."""
    case = Case(32, 4, 16, dtype=torch.float32)
    x = case.x.double().flatten(1)
    raw = (x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()) @ case.fn.double().T
    signs = {
        "random": torch.zeros(4, 4), "corners": normal(4, 4, seed=9).sign(), "diagonal": 2 * torch.eye(4) - 1,
        "one column": 2 * torch.eye(4)[:1].expand(4, 4) - 1,
    }[kind]  # fmt: skip
    share = 1.0 if kind == "random" else 0.1
    case.scale = torch.full((24,), share * most / float(raw.abs().max()))
    case.base = torch.cat([torch.zeros(8), signs.flatten() * most * (1 - share)])
    logits = raw * case.scale.double() + case.base.double()
    expected = hyper_connections.sinkhorn(logits[:, 8:].unflatten(-1, (4, 4)), case.rounds, EPS)
    comb = tensor(case.run(1).outputs[3])
    assert (comb - expected).abs().max() <= 1e-5


def test_layout():
    """Which value of fn lies where, and the mixes stream by stream."""
    fn = torch.arange(15.0).unsqueeze(1) * 1000 + torch.arange(3 * 1280.0)
    packed = streams_layout.pack_streams(fn, 3, 2)
    assert packed.shape == (2, 128, 15, 15)
    core, part, width, stream = 1, 3, 77, 2
    column = stream * 1280 + core * 640 + part * 128 + width
    own_mixes = [2, 5, 12, 13, 14]  # pre, post and comb from the third stream
    assert torch.equal(packed[core, width, stream * 5 + part, stream * 5 : stream * 5 + 5], fn[own_mixes, column])
    assert streams_layout.by_stream(torch.arange(8), 2).tolist() == [[0, 2, 4, 5], [1, 3, 6, 7]]
    assert streams_layout.fits(4, 5120, 2) and not streams_layout.fits(4, 262, 2) and not streams_layout.fits(11, 64, 2)
    assert not streams_layout.fits(4, 33, 2)


def test_refusals():
    for change, text in (
        ({"pre_mix": normal(2, 3)}, r"pre_mix \(2, 3\), expected \(2, 4\)"),
        ({"weight": normal(1, 63)}, r"weight \(1, 63\), expected \(1, 64\)"),
        ({"scale": normal(1, 24)}, r"scale \(1, 24\), expected \(4, 6\)"),
        ({"x": normal(2, 4, 62)}, "other columns"),
        ({"fn": Case(2, 4, 64).operands(2)["fn"]}, "for 2 cores, launched on 1"),
    ):
        with pytest.raises(AssertionError, match=text):
            Case(2, 4, 64).run(1, **change)
    with pytest.raises(AssertionError, match="to 128 mixes and parts"):
        Case(2, 11, 16).run(1)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The docstring's figures: what three launches take in 38.7 us, of VectorE's time a third."""
    trace = Case(6, 4, 5120).run(2).trace
    for core in (0, 1):
        assert trace.count("nc_matmul", core) == 80 + 2 * 39 + 9 and trace.count("nc_transpose", core) == 4 + 1
        assert trace.count("reciprocal", core) == 39 + 1 and trace.count("sendrecv", core) == 1
    assert trace.critical_path_us() == pytest.approx(19.3, abs=0.06)
    busy = trace.busy()
    assert busy["vector"] == pytest.approx(3.3, abs=0.06) and max(busy.values()) <= 5.2
    trace = Case(128, 4, 5120).run(2).trace
    assert trace.critical_path_us() == pytest.approx(108, abs=0.6) and trace.busy()["scalar"] == pytest.approx(53, abs=0.6)
    peak = trace.peak()
    assert peak["sbuf"] <= 200 * 1024 and peak["psum"] <= 16 * 1024, peak


@pytest.mark.parametrize("source", [sublayer_input, stream_sums, sinkhorn])
def test_lint(source):
    assert lint(source.__file__) == []
