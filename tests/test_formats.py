# SPDX-License-Identifier: Apache-2.0
"""The number formats: rules that no golden file pins, and an independent reference (ml_dtypes) over every bf16 value."""

import ml_dtypes
import numpy as np
import pytest
import torch

from modeling_deepseek_v41.formats import (
    decode_fp4,
    decode_fp8,
    decode_fp8_rows,
    decode_ue8m0,
    qdq_fp4_e4m3,
    qdq_fp4_ue8m0,
    qdq_fp8,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 2.0**104
"""Beyond it the constants that round in fp32 overflow; no activation of the model comes near."""

TIES = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]


def finite_bf16() -> np.ndarray:
    """All bf16 values up to LARGEST as fp32, both zeros and all subnormals among them."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    return values[np.abs(values) <= LARGEST]


def grouped(values: np.ndarray, size: int, fillers: tuple[float, ...]) -> np.ndarray:
    """Groups [n, size] that hold every value beside a multiple of it, once per filler, then zeros."""
    rows = np.zeros((len(fillers), len(values), size), np.float32)
    rows[..., 0] = values
    rows[..., 1] = np.clip(np.float32(fillers)[:, None] * values, -LARGEST, LARGEST)
    return rows.reshape(-1, size)


def power_of_two_scale(amax: np.ndarray, largest: float, floor: float) -> np.ndarray:
    """2^ceil(log2(max(amax, floor) / largest)) by frexp, float64; the quotient is the fp32 product with 1/largest."""
    ratio = (np.maximum(amax, np.float32(floor)) * np.float32(1.0 / largest)).astype(np.float32)
    mantissa, exponent = np.frexp(ratio.astype(np.float64))
    return np.ldexp(1.0, exponent - (mantissa == 0.5))


def equal(found: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal values; 0 equals -0, which no product or sum tells apart."""
    return np.array_equal(found.numpy(), expected.astype(np.float32))


def test_fp8_activation_qdq_is_ml_dtypes_e4m3fn_for_every_bf16_value() -> None:
    groups = grouped(finite_bf16(), 32, (1.0, -1.9921875, 0.3, 17.0, 240.0, 1000.0))
    scale = power_of_two_scale(np.abs(groups).max(-1, keepdims=True), 448.0, 1e-4)
    expected = (groups / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    assert equal(qdq_fp8(torch.from_numpy(groups)), expected)


def test_fp4_index_qdq_is_ml_dtypes_e2m1_for_every_bf16_value() -> None:
    groups = grouped(finite_bf16(), 32, (1.0, -1.9921875, 0.3, 3.5, 7.0, 11.0))
    scale = power_of_two_scale(np.abs(groups).max(-1, keepdims=True), 6.0, 6.0 * 2.0**-126)
    expected = (groups / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale
    assert equal(qdq_fp4_ue8m0(torch.from_numpy(groups)), expected)


def test_fp4_compressed_qdq_is_ml_dtypes_e2m1_with_e4m3_scales_for_every_bf16_value_up_to_the_largest_scale() -> None:
    values = finite_bf16()
    values = values[np.abs(values) <= 6 * 448]
    groups = grouped(values, 16, (1.0, -0.9, 0.3, 0.1))
    amax = np.abs(groups).max(-1, keepdims=True)
    ratio = np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6)
    scale = ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    quotient = np.clip(groups / scale, -6, 6)
    expected = quotient.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    assert equal(qdq_fp4_e4m3(torch.from_numpy(groups)), expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("tie", "rounded"), TIES)
def test_fp4_ties_go_to_the_even_code(tie: float, rounded: float, sign: float) -> None:
    for qdq, size in ((qdq_fp4_ue8m0, 32), (qdq_fp4_e4m3, 16)):
        for unit in (1.0, 2.0**-5, 8.0):
            group = torch.zeros(size)
            group[0], group[1] = 6.0 * unit, sign * tie * unit
            assert qdq(group)[1].item() == sign * rounded * unit


@pytest.mark.parametrize(("tie", "rounded"), TIES)
def test_fp4_values_beside_a_tie_go_to_the_nearer_code(tie: float, rounded: float) -> None:
    below, above = max(v for v in E2M1 if v <= tie), min(v for v in E2M1 if v >= tie)
    for qdq, size in ((qdq_fp4_ue8m0, 32), (qdq_fp4_e4m3, 16)):
        group = torch.zeros(size)
        group[:3] = torch.tensor([6.0, *np.nextafter(np.float32(tie), np.float32([0, 9]))])
        assert qdq(group)[1:3].tolist() == [below, above]


def test_fp8_scale_has_a_floor_of_amax_1e_4() -> None:
    scale = 2.0 ** np.ceil(np.log2(1e-4 / 448))
    step = scale * 2.0**-9
    tiny = torch.full((32,), 0.49 * step, dtype=torch.float32)
    assert not qdq_fp8(tiny).any()
    assert (qdq_fp8(tiny * 2) == step).all()
    assert (qdq_fp8(torch.full((32,), 9e-5)) == qdq_fp8(torch.cat([torch.full((31,), 9e-5), torch.tensor([1e-4])]))[0]).all()
    assert qdq_fp8(torch.full((32,), 9e-5))[0] != torch.full((1,), 9e-5)


def test_compressed_scale_has_a_floor_of_2_to_the_minus_9() -> None:
    smallest = 2.0**-9
    assert (qdq_fp4_e4m3(torch.full((16,), 0.5 * smallest)) == 0.5 * smallest).all()
    assert not qdq_fp4_e4m3(torch.full((16,), 0.25 * smallest)).any()


@pytest.mark.parametrize("qdq", [qdq_fp8, qdq_fp4_ue8m0, qdq_fp4_e4m3])
def test_zeros_stay_zeros(qdq) -> None:
    assert not qdq(torch.zeros(32)).any()
    assert not qdq(torch.full((32,), -0.0)).any()


def test_index_scale_has_a_floor_that_keeps_it_a_normal_number() -> None:
    for value in (0.0, 2.0**-149, 2.0**-140):
        assert not qdq_fp4_ue8m0(torch.full((32,), value)).any()
    assert (qdq_fp4_ue8m0(torch.full((32,), 2.0**-126)) == 2.0**-126).all()


def test_compressed_scale_is_not_a_power_of_two() -> None:
    group = torch.zeros(16)
    group[0], group[1] = 7.0, 1.0
    scale = float(np.float32(7 / 6).astype(ml_dtypes.float8_e4m3fn))
    assert scale == 1.125
    assert qdq_fp4_e4m3(group)[:2].tolist() == [6 * scale, scale]


def test_compressed_scale_saturates_at_448() -> None:
    group = torch.zeros(16)
    group[0] = 6.0 * 448 * 3
    assert qdq_fp4_e4m3(group)[0].item() == 6.0 * 448


def test_groups_are_independent() -> None:
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0))
    x[..., 32:64] *= 1000
    for qdq, size in ((qdq_fp8, 32), (qdq_fp4_ue8m0, 32), (qdq_fp4_e4m3, 16)):
        parts = torch.cat([qdq(part) for part in x.split(size, -1)], -1)
        assert torch.equal(qdq(x), parts)


@pytest.mark.parametrize("qdq", [qdq_fp8, qdq_fp4_ue8m0, qdq_fp4_e4m3])
def test_the_input_is_not_changed_and_bf16_inputs_give_the_same_values(qdq) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = x.float()
    kept = wide.clone()
    assert torch.equal(qdq(wide), qdq(x))
    assert torch.equal(wide, kept)


@pytest.mark.parametrize("qdq", [qdq_fp8, qdq_fp4_ue8m0])
def test_results_are_exact_in_bf16(qdq) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-5, 5, 64)[:, None]
    assert torch.equal(qdq(x).bfloat16().float(), qdq(x))


@pytest.mark.parametrize(
    ("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (120, 2.0**-7), (127, 1.0), (128, 2.0), (254, 2.0**127)]
)
def test_ue8m0_byte_is_a_power_of_two(byte: int, value: float) -> None:
    assert decode_ue8m0(torch.tensor([byte], dtype=torch.uint8)).item() == value


def test_ue8m0_is_ml_dtypes_for_every_number() -> None:
    scales = np.arange(255, dtype=np.uint8)
    expected = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert equal(decode_ue8m0(torch.from_numpy(scales)), expected)


def test_fp4_weights_have_the_even_column_in_the_low_nibble_and_a_sign_in_bit_3() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[0::2] | codes[1::2] << 4).unsqueeze(0)
    expected = codes.numpy().astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    found = decode_fp4(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert equal(found[0], 2 * expected)
    assert found[0, 8].item() == 0.0 and torch.signbit(found[0, 8])


def test_fp4_weights_have_one_scale_per_row_and_32_columns() -> None:
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[127, 120], [128, 1]], dtype=torch.uint8)
    found = decode_fp4(packed, scale)
    assert found.view(2, 2, 32).unique(dim=-1).squeeze(-1).tolist() == [[1.0, 2.0**-7], [2.0, 2.0**-126]]


@pytest.mark.parametrize("shape", [(32, 32), (40, 70), (1, 33), (64, 96)])
def test_fp8_weights_have_one_scale_per_32_by_32_block(shape: tuple[int, int]) -> None:
    n, k = shape
    rng = np.random.default_rng(n * 100 + k)
    codes = rng.integers(0, 0x7F, shape).astype(np.uint8) | (rng.integers(0, 2, shape) << 7).astype(np.uint8)
    scale = rng.integers(110, 140, (-(-n // 32), -(-k // 32))).astype(np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    factors = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = np.stack([[values[i, j] * factors[i // 32, j // 32] for j in range(k)] for i in range(n)])
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    assert equal(decode_fp8(weight, torch.from_numpy(scale)), expected)
    assert equal(decode_fp8(weight, torch.from_numpy(scale), torch.bfloat16).float(), expected)


def test_fp8_decoding_keeps_a_value_of_2_to_the_minus_18_beside_1() -> None:
    weight = torch.tensor([[1.0, 2.0**-9]]).to(torch.float8_e4m3fn)
    assert decode_fp8(weight, torch.tensor([[118]], dtype=torch.uint8)).tolist() == [[2.0**-9, 2.0**-18]]


def test_table_rows_have_one_scale_per_32_columns() -> None:
    weight = torch.full((3, 64), -1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [0, 120], [254, 1]], dtype=torch.uint8)
    found = decode_fp8_rows(weight.view(torch.uint8), scale)
    assert torch.equal(found, -1.5 * decode_ue8m0(scale).repeat_interleave(32, 1))
