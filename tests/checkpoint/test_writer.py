# SPDX-License-Identifier: Apache-2.0
"""The quantisers against ml_dtypes, and shards that the safetensors library and the reader read back."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from modeling_deepseek_v41.checkpoint.shard import read_header
from modeling_deepseek_v41.checkpoint.writer import quantize_fp4, quantize_fp8, write_shards
from modeling_deepseek_v41.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def reference(
    weight: np.ndarray, block: tuple[int, int], limit: float, kind: type
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scale bytes, decoded values), block by block, rounding with ml_dtypes."""
    rows, columns = weight.shape
    codes = np.zeros((rows, columns), dtype=np.uint8)
    decoded = np.zeros((rows, columns))
    scales = np.zeros((-(-rows // block[0]), -(-columns // block[1])), dtype=np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            part = weight[where].astype(np.float64)
            largest = float(np.abs(part).max())
            exponent = 0
            if largest > 0:
                mantissa, exponent = math.frexp(largest / limit)
                exponent = max(-127, exponent - 1 if mantissa == 0.5 else exponent)
            scales[i, j] = exponent + 127
            rounded = (part / 2.0**exponent).astype(np.float32).astype(kind)
            codes[where] = rounded.view(np.uint8)
            decoded[where] = rounded.astype(np.float64) * 2.0**exponent
    return codes, scales, decoded


def cases(columns: int) -> dict[str, torch.Tensor]:
    """Weights of many magnitudes; fp4 ties and saturation points; zeros."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(70, columns, generator=generator)
    spread = normal * torch.exp2(torch.randint(-30, 30, (70, 1), generator=generator).float())
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, 448.0, 464.0, 17.0])
    ties = torch.cat([steps, -steps, steps.nextafter(torch.tensor(9e9)), steps.nextafter(torch.tensor(-9e9))])
    ties = ties.repeat(70 * columns // len(ties) + 1)[: 70 * columns].view(70, columns).contiguous()
    return {"normal": normal, "spread": spread, "ties": ties, "zeros": torch.zeros(70, columns), "tiny": normal * 2.0**-110}


@pytest.mark.parametrize("name", ["normal", "spread", "ties", "zeros", "tiny"])
@pytest.mark.parametrize("block", [(32, 32), (1, 32)])
@pytest.mark.parametrize("columns", [96, 100])
def test_fp8_equals_ml_dtypes(name: str, block: tuple[int, int], columns: int) -> None:
    weight = cases(columns)[name]
    codes, scales, decoded = reference(weight.numpy(), block, 448.0, ml_dtypes.float8_e4m3fn)
    values, scale = quantize_fp8(weight, block)
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.uint8
    np.testing.assert_array_equal(scale.numpy(), scales)
    np.testing.assert_array_equal(values.view(torch.uint8).numpy(), codes)
    magnitude = np.abs(weight.double().numpy())
    error = np.abs(decoded - weight.double().numpy())
    smallest = 2.0 ** (scales.astype(int) - 127 - 10)  # half of e4m3's smallest subnormal
    smallest = smallest.repeat(block[0], 0).repeat(block[1], 1)[: weight.shape[0], :columns]
    bound = np.maximum(magnitude * 2.0**-4, smallest)
    assert (error <= bound).all()


@pytest.mark.parametrize("name", ["normal", "spread", "ties", "zeros", "tiny"])
def test_fp4_equals_ml_dtypes(name: str) -> None:
    weight = cases(96)[name]
    codes, scales, _ = reference(weight.numpy(), (1, 32), 6.0, ml_dtypes.float4_e2m1fn)
    packed, scale = quantize_fp4(weight)
    assert packed.dtype == torch.int8 and packed.shape == (70, 48) and scale.dtype == torch.uint8
    np.testing.assert_array_equal(scale.numpy(), scales)
    have = packed.view(torch.uint8).numpy()
    np.testing.assert_array_equal(have & 15, codes[:, 0::2] & 15)
    np.testing.assert_array_equal(have >> 4, codes[:, 1::2] & 15)


def test_quantised_values_come_back() -> None:
    generator = torch.Generator().manual_seed(1)
    exact = torch.randint(-8, 9, (64, 64), generator=generator).float()
    exact[::32, ::32] = 448.0
    values, scale = quantize_fp8(exact)
    assert torch.equal(values.float(), exact) and (scale == 127).all()
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6]).repeat(4, 2) * 8
    packed, scale = quantize_fp4(codes)
    assert (scale == 130).all()
    assert packed.view(torch.uint8)[0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]


def tensors() -> list[tuple[str, torch.Tensor]]:
    """One tensor of every stored type, and one that is a view."""
    weight, scale = quantize_fp8(torch.randn(64, 96))
    packed, packed_scale = quantize_fp4(torch.randn(64, 96))
    return [
        ("a.weight", weight),
        ("a.scale", scale),
        ("b.weight", packed),
        ("b.scale", packed_scale),
        ("c.weight", packed.view(torch.uint8)),
        ("norm.weight", torch.randn(96).bfloat16()),
        ("sink", torch.randn(2, 8)[:, ::2]),
    ]


def test_shards_read_back(tmp_path: Path) -> None:
    written = tensors()
    weight_map = write_shards(written, tmp_path / "new", shard_bytes=6200)
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + [INDEX]
    index = json.loads(files[-1].read_text())
    assert index["weight_map"] == weight_map
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in written)
    dtypes = {"a.weight": "F8_E4M3", "a.scale": "F8_E8M0", "b.weight": "I8", "b.scale": "F8_E8M0", "c.weight": "I8"}
    dtypes |= {"norm.weight": "BF16", "sink": "F32"}
    for name, tensor in written:
        file = tmp_path / "new" / weight_map[name]
        header = read_header(file)[name]
        assert header.dtype == dtypes[name] and header.shape == tensor.shape
        assert sum(entry.nbytes for entry in read_header(file).values()) <= 6200
        with safe_open(file, "pt") as reader:
            assert reader.metadata() == {"format": "pt"}
            stored = reader.get_tensor(name)
        assert torch.equal(stored.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    weight_map = write_shards(
        [("a", torch.zeros(4)), ("b", torch.zeros(400)), ("c", torch.zeros(4))], tmp_path, shard_bytes=100
    )
    assert len(set(weight_map.values())) == 3


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor 'a' was given twice"):
        write_shards([("a", torch.zeros(4)), ("a", torch.zeros(4))], tmp_path / "x")
    with pytest.raises(CheckpointError, match="shard_bytes: expected 1 or more, found 0"):
        write_shards([("a", torch.zeros(4))], tmp_path / "y", shard_bytes=0)
    write_shards([("a", torch.zeros(4))], tmp_path / "z")
    with pytest.raises(
        CheckpointError, match=r"already holds weights \(model-00001-of-00001.safetensors\); give an empty folder"
    ):
        write_shards([("a", torch.zeros(4))], tmp_path / "z")
