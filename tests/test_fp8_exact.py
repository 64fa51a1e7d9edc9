# SPDX-License-Identifier: Apache-2.0
"""fp4 experts as Trainium2's fp8: every bit kept, or the row told apart. ml_dtypes' float8_e4m3 is the independent decoder."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modeling_deepseek_v41.formats import decode_fp4
from modeling_deepseek_v41.fp8_exact import decode_codes, reencode


def as_fp32(codes: Tensor, base: Tensor) -> Tensor:
    """codes [n, k] and base [n] through ml_dtypes' own table and fp64."""
    wide = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3).astype(np.float64))
    return (wide * torch.exp2(base.double())[:, None]).float()


def assert_exact(packed: Tensor, scale: Tensor) -> Tensor:
    """Checks the rows that are said to be exact, and returns which are."""
    rows = reencode(packed, scale)
    expected = decode_fp4(packed, scale)
    found = as_fp32(rows.codes, rows.base)
    assert torch.equal(found.view(torch.int32)[rows.exact], expected.view(torch.int32)[rows.exact])
    assert not rows.codes[~rows.exact].any()
    fields = (rows.codes >> 3) & 15
    assert (fields < 15).all(), "no infinity, no NaN"
    assert ((rows.codes & 127 == 0) | (fields > 0)).all(), "no subnormal"
    return rows.exact


def weights(seed: int, n: int, groups: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 16 * groups), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("span", range(21))
def test_spans(span: int) -> None:
    """Every code meets the highest and the lowest scale of its row; 10 binades fit, and more do not."""
    codes = torch.arange(16, dtype=torch.uint8)
    group = torch.cat([codes, codes]).view(16, 2)
    packed = (group[:, 0] | group[:, 1] << 4).repeat(3)[None].expand(40, -1).contiguous()
    top = torch.arange(60, 100, dtype=torch.uint8)
    scale = torch.stack([top, top - span // 2, top - span], 1)
    exact = assert_exact(packed, scale)
    assert exact.all() if span <= 10 else not exact.any()


def test_a_span_is_that_of_values_not_of_scales() -> None:
    """A group of zeros has no exponent, and groups of the largest code alone may be 13 binades apart."""
    packed = weights(0, 2, 3)
    packed[:, 16:32] = 0x80
    scale = torch.tensor([[100, 0, 100], [100, 254, 99]], dtype=torch.uint8)
    assert assert_exact(packed, scale).all()
    large = torch.full((1, 32), 0x77, dtype=torch.uint8)
    for low, good in ((88, True), (87, True), (86, False)):
        assert assert_exact(large, torch.tensor([[100, low]], dtype=torch.uint8)).all() == good


@pytest.mark.parametrize("byte", range(255))
def test_every_scale(byte: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scale = torch.full((1, 16), byte, dtype=torch.uint8)
    assert assert_exact(packed, scale).all()


@given(st.integers(0, 2**31), st.integers(0, 254), st.integers(0, 20), st.integers(1, 5))
def test_random_rows(seed: int, top: int, span: int, groups: int) -> None:
    packed = weights(seed, 24, groups)
    generator = torch.Generator().manual_seed(seed)
    scale = (top - torch.randint(span + 1, (24, groups), generator=generator)).clamp(0, 254).to(torch.uint8)
    exact = assert_exact(packed, scale)
    if span <= 10 and 7 <= top <= 200 and (scale > 0).all():
        assert exact.all()


def test_zeros_keep_their_sign() -> None:
    packed = torch.tensor([[0x80, 0x08] * 8, [0x00] * 16], dtype=torch.uint8)
    rows = reencode(packed, torch.tensor([[3], [254]], dtype=torch.uint8))
    assert rows.exact.all() and not rows.base.any()
    assert rows.codes[0].tolist() == [0, 128, 128, 0] * 8
    assert_exact(packed, torch.tensor([[3], [254]], dtype=torch.uint8))


def test_codes_are_decoded_as_ml_dtypes_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3).astype(np.float32))
    finite = expected.isfinite()
    assert torch.equal(decode_codes(codes)[finite].view(torch.int32), expected[finite].view(torch.int32))
