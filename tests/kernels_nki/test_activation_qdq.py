# SPDX-License-Identifier: Apache-2.0
"""The activation QDQ kernel against formats.qdq_fp8, and against the definition where that overflows."""

import ml_dtypes
import numpy as np
import pytest
import torch
from nki_emulator import lint, real_nki, run

from modeling_deepseek_v41.formats import qdq_fp8
from modeling_deepseek_v41.kernels.nki import activation_qdq as module
from modeling_deepseek_v41.kernels.nki import groups as layout
from modeling_deepseek_v41.kernels.nki import rounding

CORES = pytest.mark.parametrize("cores", [1, 2])
FINITE = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE = FINITE[np.isfinite(FINITE.astype(np.float32))]
REFERENCE_LIMIT = 2.0**108
"""From here on formats.qdq_fp8 adds more than fp32 holds."""


def reference(x: np.ndarray) -> np.ndarray:
    """formats.qdq_fp8 of bf16 [M, K] as bf16."""
    return qdq_fp8(torch.from_numpy(x.astype(np.float32))).numpy().astype(ml_dtypes.bfloat16)


def definition(x: np.ndarray) -> np.ndarray:
    """e4m3fn(x / s) * s in fp64 with ml_dtypes' cast, zeros positive."""
    groups = x.astype(np.float64).reshape(-1, 32)
    amax = np.maximum(np.abs(groups).max(1, keepdims=True), np.float64(np.float32(1e-4)))
    scale = np.exp2(np.ceil(np.log2(amax / 448)))
    values = (groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale + 0.0
    with np.errstate(over="ignore"):
        return values.astype(ml_dtypes.bfloat16).reshape(x.shape)


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def random(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    spread = np.exp2(generator.integers(-30, 30, (rows, columns // 32)).repeat(32, 1))
    return (generator.standard_normal((rows, columns)) * spread).astype(ml_dtypes.bfloat16)


@CORES
@pytest.mark.parametrize(
    "rows, columns", [(1, 32), (1, 5120), (6, 5120), (7, 5120), (128, 5120), (3, 96), (131, 32), (6, 2304)]
)
def test_matches_the_reference(rows, columns, cores):
    x = random(rows, columns)
    same_bits(run(module.activation_qdq, x, cores=cores).outputs, reference(x))


@pytest.mark.parametrize("amax", ["itself", "larger"])
def test_every_finite_bf16(amax):
    """Each as its group's largest value, and each beside a larger one of every distance that rounds it differently."""
    x = np.zeros((FINITE.size, 32), np.float32)
    x[:, 7] = FINITE
    if amax == "larger":
        exponents = np.frexp(np.abs(x[:, 7]))[1]
        for column in range(8, 32):
            x[:, column] = np.where(
                np.arange(FINITE.size) % 24 == column - 8, np.exp2(np.minimum(exponents + column - 8.0, 127)), 0
            )
    x = x.astype(ml_dtypes.bfloat16)
    found = run(module.activation_qdq, x).outputs
    same_bits(found, definition(x))
    below = np.abs(x.astype(np.float32)).max(1) < REFERENCE_LIMIT
    same_bits(found[below], reference(x[below]))


def test_the_exponent_of_the_product_is_the_scale():
    """rounding.FLOOR_FACTOR for every bf16 amax: a floor after the product is the reference's ceil before it."""
    amax = np.maximum(np.abs(FINITE.astype(np.float32)), np.float32(rounding.AMAX_FLOOR))
    product = amax * np.float32(rounding.FLOOR_FACTOR)
    floor = (product.view(np.int32) & rounding.EXPONENT32).view(np.float32)
    np.testing.assert_array_equal(floor.astype(np.float64) * 64, np.exp2(np.ceil(np.log2(amax.astype(np.float64) / 448))))


@pytest.mark.parametrize(
    "x, text",
    [
        (np.zeros((2, 48), ml_dtypes.bfloat16), r"\[2, 48\].*no multiple of 32"),
        (np.zeros((2, 32), np.float32), "found float32"),
    ],
)
def test_refusals(x, text):
    with pytest.raises(AssertionError, match=text):
        run(module.activation_qdq, x)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    """The docstring's figures."""
    counts = {"dma_copy": 2, "scalar_tensor_tensor": 2, "tensor_reduce": 1, "tensor_scalar": 6, "tensor_tensor": 1}
    for cores, critical, vector in ((1, 8.0, 2.33), (2, 6.6, 1.27)):
        trace = run(module.activation_qdq, random(6, 5120), cores=cores).trace
        assert trace.counts(0) == counts
        assert trace.critical_path_us() == pytest.approx(critical, abs=0.05)
        assert trace.busy()["vector"] == pytest.approx(vector, abs=0.01)
    groups = -(-128 * 160 // 128)
    trace = run(module.activation_qdq, random(128, 5120)).trace
    assert trace.counts(0) == {name: count * -(-groups // layout.BLOCK) for name, count in counts.items()}
    assert trace.peak()["sbuf"] <= 37 * 1024


@pytest.mark.parametrize("source", [module, layout, rounding])
def test_lint(source):
    assert lint(source.__file__) == []
