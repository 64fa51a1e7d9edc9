# SPDX-License-Identifier: Apache-2.0
"""The QDQ of index keys and of compressed KV against formats, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
from comparing import CORES
from nki_emulator import lint, real_nki, run

from modeling_deepseek_v41 import formats
from modeling_deepseek_v41.kernels.nki import cache_qdq as module

FORMS = pytest.mark.parametrize("form", ["fp4_ue8m0", "fp4_e4m3"])
REFERENCES = {"fp4_ue8m0": formats.qdq_fp4_ue8m0, "fp4_e4m3": formats.qdq_fp4_e4m3}
FINITE = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE = FINITE[np.isfinite(FINITE.astype(np.float32))]
REFERENCE_LIMIT = 2.0**105
"""From here on formats.qdq_fp4_ue8m0 adds more than fp32 holds."""


def reference(x: np.ndarray, form: str) -> np.ndarray:
    return REFERENCES[form](torch.from_numpy(x.astype(np.float32))).numpy().astype(ml_dtypes.bfloat16)


def definition(x: np.ndarray) -> np.ndarray:
    """e2m1(x / s) * s with power-of-two scales in fp64 with ml_dtypes' cast, zeros positive."""
    groups = x.astype(np.float64).reshape(-1, 32)
    amax = np.maximum(np.abs(groups).max(1, keepdims=True), 6 * 2.0**-126)
    scale = np.exp2(np.ceil(np.log2(amax / 6)))
    values = (groups / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale + 0.0
    with np.errstate(over="ignore"):
        return values.astype(ml_dtypes.bfloat16).reshape(x.shape)


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@FORMS
@CORES
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (6, 512), (7, 128), (128, 512), (131, 96), (24, 128)])
def test_matches_the_reference(rows, columns, form, cores):
    generator = np.random.default_rng(0)
    spread = np.exp2(generator.integers(-20, 20, (rows, columns // 16)).repeat(16, 1))
    x = (generator.standard_normal((rows, columns)) * spread).astype(ml_dtypes.bfloat16)
    same_bits(run(module.cache_qdq, x, form=form, cores=cores).outputs, reference(x, form))


@FORMS
@pytest.mark.parametrize("amax", ["itself", "larger"])
def test_every_finite_bf16(form, amax):
    """Each as its group's largest value, and each beside a larger one of many distances and mantissas."""
    width = 32 if form == "fp4_ue8m0" else 16
    x = np.zeros((FINITE.size, width), np.float32)
    x[:, 7] = FINITE
    if amax == "larger":
        number = np.arange(FINITE.size)
        largest = np.ldexp(1 + number % 113 / 128, np.minimum(np.frexp(np.abs(x[:, 7]))[1] + number % 6 - 1, 127))
        x[:, 8] = np.where(number % 2 == 0, largest, -largest)
    x = x.astype(ml_dtypes.bfloat16)
    x = x[np.isfinite(x.astype(np.float32)).all(1)]
    found = run(module.cache_qdq, x, form=form).outputs
    if form == "fp4_e4m3":
        same_bits(found, reference(x, form))
        return
    same_bits(found, definition(x))
    below = np.abs(x.astype(np.float32)).max(1) < REFERENCE_LIMIT
    same_bits(found[below], reference(x[below], form))


def test_every_boundary_of_e4m3_scales():
    """bf16 values at each boundary between two e2m1 values times each e4m3 scale, and next to it."""
    codes = np.arange(0x08, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    boundary = (codes[:, None] * np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)).astype(ml_dtypes.bfloat16)
    near = boundary.view(np.uint16)[:, None, :] + np.arange(-1, 2, dtype=np.int32)[None, :, None]
    values = near.astype(np.uint16).view(ml_dtypes.bfloat16)
    x = np.zeros((codes.size, 3, 16), ml_dtypes.bfloat16)
    x[:, :, 0:7], x[:, :, 7:14] = values, -values
    x[:, :, 14] = (codes * 6).astype(ml_dtypes.bfloat16)[:, None]
    x = x.reshape(-1, 16)
    same_bits(run(module.cache_qdq, x, form="fp4_e4m3").outputs, reference(x, "fp4_e4m3"))


def test_refusals():
    for x, form, text in (
        (np.zeros((2, 48), ml_dtypes.bfloat16), "fp4_ue8m0", r"\(2, 48\).*no multiple of 32"),
        (np.zeros((2, 24), ml_dtypes.bfloat16), "fp4_e4m3", r"\(2, 24\).*no multiple of 16"),
        (np.zeros((2, 32), np.float32), "fp4_e4m3", "found float32"),
        (np.zeros((2, 32), ml_dtypes.bfloat16), "fp8", "form fp8: expected"),
    ):
        with pytest.raises(AssertionError, match=text):
            run(module.cache_qdq, x, form=form)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
@pytest.mark.parametrize(
    ("form", "rows", "columns", "vector", "critical"), [("fp4_ue8m0", 24, 128, 12, 5.7), ("fp4_e4m3", 6, 512, 19, 6.4)]
)
def test_cost(form, rows, columns, vector, critical):
    trace = run(module.cache_qdq, np.ones((rows, columns), ml_dtypes.bfloat16), form=form, cores=2).trace
    assert trace.count("dma_copy", 0) == 2
    found = sum(one.engine == "vector" and one.core == 0 for one in trace.instructions)
    assert found == vector
    assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)


def test_lint():
    assert lint(module.__file__) == []
