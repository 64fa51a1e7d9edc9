# SPDX-License-Identifier: Apache-2.0
"""Unmodified kernels of nki-library run and agree with NumPy.

They need a checkout of github.com/aws-neuron/nki-library (Apache-2.0), named by the environment variable NKI_LIBRARY; without
it these tests are skipped.
"""

import importlib
import os
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from . import lint, run

CHECKOUT = os.environ.get("NKI_LIBRARY")
CORE = Path(CHECKOUT or ".") / "src" / "nkilib_src" / "nkilib" / "core"
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="NKI_LIBRARY names no checkout of nki-library")
rng = np.random.default_rng(0)


@pytest.fixture
def library(monkeypatch):
    """Import a module of the library without running its packages' own __init__, which import everything."""
    names = ["nkilib", "nkilib.core", *(f"nkilib.core.{one.name}" for one in CORE.iterdir() if one.is_dir())]
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(CORE.parent.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    yield lambda name: importlib.import_module(f"nkilib.core.{name}")
    for name in [one for one in sys.modules if one.startswith("nkilib")]:
        del sys.modules[name]


def test_cumsum(library):
    x = rng.standard_normal((130, 2100)).astype(np.float32)
    np.testing.assert_array_equal(run(library("cumsum.cumsum").cumsum, x).outputs, np.cumsum(x, 1, dtype=np.float32))


@pytest.mark.parametrize("cores", [1, 2])
def test_rmsnorm_quant(library, cores):
    module = library("rmsnorm.rmsnorm_quant")
    x = rng.standard_normal((1, 200, 1024)).astype(ml_dtypes.bfloat16)
    weight = rng.standard_normal((1, 1024)).astype(ml_dtypes.bfloat16)
    packed = run(module.rmsnorm_quant_kernel, x, weight, module.RmsNormQuantKernelArgs(), cores=cores).outputs
    scale = np.ascontiguousarray(packed[..., -4:]).view(np.float32)
    exact = x.astype(np.float32)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float32)
    error = np.abs(packed[..., :-4].astype(np.float32) * scale - exact)
    assert (error <= np.abs(exact) * 2**-4 + scale * 2**-3).all()


@pytest.mark.parametrize("cores, rows, size, k", [(1, 6, 4096, 512), (2, 6, 4096, 64)])
def test_rotational_topk(library, cores, rows, size, k):
    pytest.importorskip("scipy", reason="rotational_topk_utils imports scipy")
    module, utilities = library("topk.rotational_topk"), library("topk.rotational_topk_utils")
    x = rng.standard_normal((rows, size)).astype(np.float32)
    config = utilities.create_topk_config(inp_shape=x.shape, inp_dtype="float32", k=k, sorted=True, num_programs=cores)
    config = module.prepare_rotational_constants(utilities.create_rotational_topk_config(inp_shape=x.shape, topk_config=config))
    result = run(module.rotational_topk, x, config, cores=config.n_prgs)
    module.cleanup_rotational_constants()
    values, indices = result.outputs
    np.testing.assert_array_equal(values, -np.sort(-x, 1)[:, :k])
    np.testing.assert_array_equal(np.take_along_axis(x, indices.astype(np.int64), 1), values)


@pytest.mark.parametrize("options", [{}, {"contiguous_layout": False}, {"contiguous_layout": False, "relayout_in_sbuf": True}])
def test_rope(library, options):
    x = rng.standard_normal((128, 1, 2, 64)).astype(np.float32)
    cos, sin = (rng.standard_normal((64, 1, 64)).astype(np.float32) for _ in range(2))
    out = run(library("embeddings.rope").RoPE, x, cos, sin, **options).outputs
    first, second = (x[:64], x[64:]) if options == {} else (x[::2], x[1::2])
    c, s = cos[:, :, None], sin[:, :, None]
    rotated = (first * c - second * s, second * c + first * s)
    expected = np.concatenate(rotated) if options == {} else np.stack(rotated, 1).reshape(x.shape)
    np.testing.assert_array_equal(out, expected)


def test_lint_accepts_what_was_compiled():
    """Apart from kernels that call kernels, which the migration guide refuses, nothing is reported."""
    found = []
    for path in sorted(CORE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "\n@nki.jit\n" in source:
            try:
                found += [one for one in lint(path) if "is called by another" not in one]
            except SyntaxError:
                continue
    assert found == []
