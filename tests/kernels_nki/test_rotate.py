# SPDX-License-Identifier: Apache-2.0
"""The rotary kernel, forth and back and with the QDQ of what is cached, against rope.rotate and formats."""

import pytest
import torch
from comparing import CORES, DTYPES, arithmetic, array, close, normal
from nki_emulator import lint, real_nki, run
from rotary import table_of

from modeling_deepseek_v41 import formats, rope
from modeling_deepseek_v41.kernels.nki import rotate as module

SHAPES = [
    (1, 1, 64, 64),
    (6, 8, 512, 64),
    (7, 3, 96, 32),
    (128, 1, 512, 64),
    (131, 5, 48, 6),
    (2, 128, 128, 64),
    (3, 1, 66, 64),
]


@CORES
@DTYPES
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "dim", "rotary"), SHAPES)
def test_rotate(tokens, heads, dim, rotary, back, dtype, cores):
    x, table = normal(tokens, heads, dim).to(dtype), table_of(tokens, rotary)
    found = run(module.rotate, array(x), array(table), back=back, cores=cores).outputs
    close(found, rope.rotate(x.float()[None], table[None], arithmetic(dtype), back)[0], dtype)


FORMS = {"fp8": formats.qdq_fp8, "fp4_ue8m0": formats.qdq_fp4_ue8m0, "fp4_e4m3": formats.qdq_fp4_e4m3}


@CORES
@pytest.mark.parametrize("tokens", [1, 6, 7, 128, 131])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 512), (2, 96), (1, 64), (32, 128)])
def test_quantised(heads, dim, form, tokens, cores):
    """The QDQ of the kernel's own rotation, to the bit."""
    x, table = normal(tokens, heads, dim).bfloat16(), table_of(tokens, 64)
    plain = run(module.rotate, array(x), array(table), cores=cores).outputs
    found = run(module.rotate, array(x), array(table), quantize=True, form=form, cores=cores).outputs
    assert torch.equal(torch.from_numpy(found.astype("f4")), FORMS[form](torch.from_numpy(plain.astype("f4"))))


@pytest.mark.parametrize(
    ("x", "table", "options", "text"),
    [
        (normal(2, 1, 64), normal(3, 2, 8), {}, r"table \(3, 2, 8\), expected \(2, 2, 8\)"),
        (normal(2, 129, 8), normal(2, 2, 8), {}, r"x \(2, 129, 8\): at most 128 heads"),
        (normal(2, 1, 8), normal(2, 2, 10), {}, r"table \(2, 2, 10\).*at most 8"),
        (normal(2, 1, 8), normal(2, 2, 7), {}, r"table \(2, 2, 7\): an even number"),
        (normal(2, 1, 64), normal(2, 2, 8), {"quantize": True}, "x is float32"),
        (normal(2, 1, 48).bfloat16(), normal(2, 2, 8), {"quantize": True}, r"x \(2, 1, 48\), columns no multiple of 32"),
        (normal(2, 1, 40).bfloat16(), normal(2, 2, 8), {"quantize": True, "form": "fp4_e4m3"}, "columns no multiple of 16"),
        (normal(2, 1, 64), normal(2, 2, 8), {"form": "fp4"}, "form fp4: expected fp8, fp4_ue8m0 or fp4_e4m3"),
        (normal(1, 1, 2050), normal(1, 2, 8), {}, r"x \(1, 1, 2050\): at most 2048"),
    ],
)
def test_refusals(x, table, options, text):
    with pytest.raises(AssertionError, match=text):
        run(module.rotate, array(x), array(table), **options)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    plain = {"dma_copy": 3, "memset": 2, "tensor_tensor": 4}
    with_qdq = {"scalar_tensor_tensor": 2, "tensor_reduce": 1, "tensor_scalar": 6, "tensor_tensor": 5}
    table = array(table_of(6, 64))
    for heads, dim, options, counts, critical in (
        (8, 512, {}, plain, 5.2),
        (1, 512, {"quantize": True}, plain | with_qdq, 6.5),
        (1, 512, {"quantize": True, "form": "fp4_e4m3"}, None, 7.8),
        (32, 128, {"quantize": True, "form": "fp4_ue8m0"}, None, 8.2),
    ):
        trace = run(module.rotate, array(normal(6, heads, dim).bfloat16()), table, cores=2, **options).trace
        assert counts is None or trace.counts(0) == counts
        assert trace.critical_path_us() == pytest.approx(critical, abs=0.06)


def test_lint():
    assert lint(module.__file__) == []
