# SPDX-License-Identifier: Apache-2.0
"""What instructions compute: the documentation's examples, and NumPy."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from . import run
from .on_device import normal, on_device, rng


def test_matmul_accumulates_over_tiles():
    """The example of nc_matmul's docstring."""

    @nki.jit
    def kernel(lhs_t, rhs):
        k, m = lhs_t.shape
        result = nl.ndarray((m, rhs.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
        psum = nl.ndarray((m, rhs.shape[1]), dtype=nl.float32, buffer=nl.psum)
        for i in nl.static_range(k // 128):
            left = nl.load(lhs_t[i * 128 : (i + 1) * 128, :])
            right = nl.load(rhs[i * 128 : (i + 1) * 128, :])
            nisa.nc_matmul(dst=psum, stationary=left, moving=right, accumulate=(i > 0))
        sbuf = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=sbuf, src=psum)
        nisa.dma_copy(dst=result, src=sbuf)
        return result

    a, b = normal(512, 64).astype(ml_dtypes.bfloat16), normal(512, 512).astype(ml_dtypes.bfloat16)
    exact = a.astype(np.float64).T @ b.astype(np.float64)
    np.testing.assert_allclose(run(kernel, a, b).outputs, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("explicit", [True, False])
def test_matmul_infers_accumulation(explicit):
    """accumulate=None overwrites first and then accumulates, also where regions overlap."""

    def body(dst, a, b):
        psum = nl.ndarray((8, 6), nl.float32, buffer=nl.psum)
        for i in range(3):
            if explicit:
                nisa.nc_matmul(psum[:, 2 * i : 2 * i + 2], a, b[:, 0:2], accumulate=False)
            else:
                nisa.nc_matmul(psum[:, i : i + 4], a, b)
        nisa.tensor_copy(dst, psum)

    a, b = normal(16, 8), normal(16, 4)
    product, expected = a.T @ b, np.zeros((8, 6), np.float32)
    for i in range(3):
        if explicit:
            expected[:, 2 * i : 2 * i + 2] = product[:, :2]
        else:
            expected[:, i : i + 4] += product
    np.testing.assert_allclose(on_device(body, a, b, shape=(8, 6)), expected, rtol=1e-6)


def test_fp8_by_bf16_and_double_row():
    a = normal(128, 2, 32).astype(ml_dtypes.float8_e4m3)
    b = normal(128, 2, 16).astype(ml_dtypes.float8_e5m2)

    def body(dst, left, right):
        psum = nl.ndarray((32, 16), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(psum, left, right, perf_mode=nisa.matmul_perf_mode.double_row)
        nisa.tensor_copy(dst, psum)

    exact = np.einsum("kpm,kpn->mn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(on_device(body, a, b, shape=(32, 16)), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposes_keep_bits(dtype):
    x = normal(96, 40).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    x[0, 0], x[1, 1] = np.nan, np.inf

    def body(dst, tile):
        psum = nl.ndarray((40, 96), dtype, buffer=nl.psum)
        nisa.nc_transpose(psum, tile)
        nisa.tensor_copy(dst, psum)

    out = on_device(body, x, shape=(40, 96), dtype=dtype)
    assert out.tobytes() == np.ascontiguousarray(x.T).tobytes()

    def by_matmul(dst, tile):
        psum = nl.ndarray((40, 96), dtype, buffer=nl.psum)
        nisa.nc_matmul(psum, tile, nl.shared_identity_matrix(128, dtype)[0:96, 0:96], is_transpose=True)
        nisa.tensor_copy(dst, psum)

    assert on_device(by_matmul, x, shape=(40, 96), dtype=dtype).tobytes() == out.tobytes()


@pytest.mark.parametrize("value, expected", [(2.5, 2), (3.5, 4), (0.5, 0), (300.0, 255), (-7.0, 0)])
def test_casts_to_integers_round_to_even_and_saturate(value, expected):
    x = np.full((1, 4), value, np.float32)
    out = on_device(lambda dst, tile: nisa.tensor_copy(dst, tile), x, shape=(1, 4), dtype="uint8")
    assert (out == expected).all()


def test_int32_is_exact_on_gpsimd_and_fp32_on_vector():
    a = np.full((1, 4), 2**24 + 1, np.int32)
    one = np.ones((1, 4), np.int32)
    exact = on_device(lambda dst, x, y: nisa.tensor_tensor(dst, x, y, nl.add), a, one, shape=(1, 4), dtype="int32")
    rounded = on_device(
        lambda dst, x, y: nisa.tensor_tensor(dst, x, y, nl.add, engine=nisa.engine.vector), a, one, shape=(1, 4), dtype="int32"
    )
    assert (exact == 2**24 + 2).all()
    assert (rounded == 2**24).all()  # 2^24 + 1 is read as 2^24, and 2^24 + 1 rounds to even


@pytest.mark.parametrize(
    "op, operand, function",
    [
        ("bitwise_and", 0x7F800000, lambda x: x & 0x7F800000),
        ("right_shift", 23, lambda x: (x.view(np.uint32) >> 23).view(np.int32)),
        ("left_shift", 3, lambda x: (x.view(np.uint32) << 3).view(np.int32)),
        ("bitwise_xor", -1, lambda x: ~x),
    ],
)
def test_bit_operators(op, operand, function):
    x = rng.integers(-(2**31), 2**31, (4, 16)).astype(np.int32)
    out = on_device(lambda dst, tile: nisa.tensor_scalar(dst, tile, getattr(nl, op), operand), x, shape=(4, 16), dtype="int32")
    np.testing.assert_array_equal(out, function(x))


def test_power_of_two_scale_by_bits():
    """ceil of log2 by integer operations on the view of a float: what the activation QDQ does."""
    x = np.abs(normal(8, 16)) + np.float32(1e-3)

    def body(dst, tile):
        bits = tile.view(nl.int32)
        nisa.tensor_scalar(bits, bits, nl.bitwise_and, 0x7F800000)
        nisa.tensor_copy(dst, tile)

    np.testing.assert_array_equal(on_device(body, x, shape=(8, 16)), np.exp2(np.floor(np.log2(x))))


def test_tensor_scalar_orders_and_vectors():
    x, v = normal(64, 32), normal(64, 1)
    out = on_device(
        lambda dst, a, b: nisa.tensor_scalar(dst, a, nl.subtract, b, reverse0=True, op1=nl.maximum, operand1=0.5),
        x,
        v,
        shape=(64, 32),
    )
    np.testing.assert_array_equal(out, np.maximum(v - x, np.float32(0.5)))


def test_scalar_tensor_tensor():
    x, y = normal(32, 8), normal(32, 8)
    out = on_device(
        lambda dst, a, b: nisa.scalar_tensor_tensor(dst, a, nl.multiply, 2.0, nl.subtract, b, reverse1=True),
        x,
        y,
        shape=(32, 8),
    )
    np.testing.assert_array_equal(out, y - x * 2)


@pytest.mark.parametrize("name, function", [("add", np.sum), ("maximum", np.max), ("minimum", np.min), ("multiply", np.prod)])
def test_tensor_reduce(name, function):
    x = normal(16, 4, 8)
    out = on_device(lambda dst, t: nisa.tensor_reduce(dst, getattr(nl, name), t, axis=2), x, shape=(16, 4))
    np.testing.assert_allclose(out, function(x, axis=2), rtol=1e-6)


def test_softmax_by_activation():
    x = normal(16, 64)

    def body(dst, tile):
        biggest, total = nl.ndarray((16, 1), nl.float32), nl.ndarray((16, 1), nl.float32)
        nisa.tensor_reduce(biggest, nl.maximum, tile, axis=1, negate=True)
        nisa.activation(
            dst, nl.exp, tile, bias=biggest, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce
        )
        nisa.reciprocal(total, total)
        nisa.tensor_scalar(dst, dst, nl.multiply, total)

    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(on_device(body, x, shape=(16, 64)), e / e.sum(1, keepdims=True), rtol=1e-6)


def test_reduce_registers_continue():
    x = normal(8, 32)

    def body(dst, tile):
        junk = nl.ndarray((8, 16), nl.float32)
        nisa.tensor_scalar_reduce(junk, tile[:, 0:16], nl.multiply, 1.0, nl.maximum)
        nisa.tensor_scalar_reduce(junk, tile[:, 16:32], nl.multiply, 1.0, nl.maximum, dst, reduce_cmd=nisa.reduce_cmd.reduce)

    np.testing.assert_array_equal(on_device(body, x, shape=(8, 1)), x.max(1, keepdims=True))


def test_iota_and_affine_select():
    """The pseudo code of their docstrings."""
    pattern, offset, multiplier = [[100, 2], [-3, 4], [1, 5]], 7, 1000
    out = on_device(lambda dst: nisa.iota(dst, pattern, offset, multiplier), shape=(3, 40), dtype="int32")
    expected = [
        [offset + p * multiplier + z * 100 - y * 3 + x for z in range(2) for y in range(4) for x in range(5)] for p in range(3)
    ]
    np.testing.assert_array_equal(out, expected)
    x = normal(8, 8)
    causal = on_device(lambda dst, t: nisa.affine_select(dst, [[-1, 8]], 1, t, -1e30, cmp_op=nl.greater_equal), x, shape=(8, 8))
    np.testing.assert_array_equal(causal, np.where(np.tril(np.ones((8, 8), bool)), x, np.float32(-1e30)))


def test_predicated_copies():
    x, y = normal(8, 16), normal(8, 16)
    predicate = rng.integers(0, 2, (8, 16)).astype(np.uint8)

    def copy(dst, a, b, p):
        nisa.tensor_copy(dst, b)
        nisa.tensor_copy_predicated(dst, a, p)

    np.testing.assert_array_equal(on_device(copy, x, y, predicate, shape=(8, 16)), np.where(predicate, x, y))
    selected = on_device(
        lambda dst, a, b, p: nisa.select_reduce(dst, p, a, -1.0, reverse_pred=True), x, y, predicate, shape=(8, 16)
    )
    np.testing.assert_array_equal(selected, np.where(predicate, -1, x))


def test_scans():
    x = normal(8, 33)
    ones = np.ones_like(x)
    running = on_device(lambda dst, a, b: nisa.tensor_tensor_scan(dst, a, b, 0.0, nl.multiply, nl.add), ones, x, shape=(8, 33))
    np.testing.assert_array_equal(running, np.cumsum(x, 1, dtype=np.float32))
    largest = on_device(lambda dst, a: nisa.tensor_scalar_cumulative(dst, a, nl.multiply, nl.maximum, 1.0), x, shape=(8, 33))
    np.testing.assert_array_equal(largest, np.maximum.accumulate(x, 1))


def test_max8_and_match_replace_with_ties():
    """The example of nc_match_replace8's docstring: its pairing of ties is the reverse of nc_find_index8's."""
    data = np.float32([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]])
    values = np.float32([[3, 8, 8, 8, 8, 8, 8, 8]])

    def replaced(dst, tile, vals):
        new = nl.ndarray((1, 11), nl.float32)
        nisa.nc_match_replace8(new, tile, vals, -1.0, dst_idx=dst)

    out = on_device(replaced, data, values, shape=(1, 8), dtype="uint32")
    assert out.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    found = on_device(lambda dst, a, b: nisa.nc_find_index8(dst, a, b), data, values, shape=(1, 8), dtype="uint32")
    assert found.tolist() == [[2, 4, 5, 6, 7, 8, 9, 10]]
    absent = on_device(lambda dst, a, b: nisa.nc_find_index8(dst, a, b), data, values * 0, shape=(1, 8), dtype="uint32")
    assert (absent == 0xFFFFFFFF).all()
    x = normal(16, 50)
    best = on_device(lambda dst, a: nisa.max8(dst, a), x, shape=(16, 8))
    np.testing.assert_array_equal(best, -np.sort(-x, 1)[:, :8])


def test_nonzero_with_count():
    """The example of its docstring; other partitions stay as they are."""
    x = np.zeros((32, 8), np.float32)
    x[0] = [0, 1, 1, 0, 0, 1, 0, 0]
    x[16] = 1

    def body(dst, tile):
        nisa.memset(dst, 77)
        nisa.nonzero_with_count(dst, tile, index_offset=16, padding_val=-1)

    out = on_device(body, x, shape=(32, 9), dtype="int32")
    assert out[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    assert out[16].tolist() == [*range(16, 24), 8]
    assert (np.delete(out, [0, 16], 0) == 77).all()


def test_rounding_to_e4m3fn_by_fp32_operations():
    """docs/kernels.md, section 1: 4 significant bits by t = x (2^20 + 1), q = t - (t - x); subnormals by a magic sum."""
    x = np.concatenate([rng.uniform(-448, 448, 4096), rng.uniform(-0.05, 0.05, 4096)]).astype(np.float32).reshape(64, 128)

    def body(dst, tile):
        big, small, use = (nl.ndarray((64, 128), nl.float32) for _ in range(3))
        pick = nl.ndarray((64, 128), nl.uint8)
        nisa.tensor_scalar(big, tile, nl.multiply, float(2**20 + 1))
        nisa.tensor_tensor(use, big, tile, nl.subtract)
        nisa.tensor_tensor(dst, big, use, nl.subtract)
        nisa.tensor_scalar(small, tile, nl.add, 1.5 * 2**14, op1=nl.subtract, operand1=1.5 * 2**14)
        nisa.tensor_scalar(pick, tile, nl.abs, None, op1=nl.less, operand1=2.0**-6)
        nisa.tensor_copy_predicated(dst, small, pick)
        nisa.tensor_scalar(dst, dst, nl.minimum, 448.0, op1=nl.maximum, operand1=-448.0)

    out = on_device(body, x, shape=(64, 128))
    np.testing.assert_array_equal(out, x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
