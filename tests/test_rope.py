# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding against complex numbers in float64, with YaRN written out a second time."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from arithmetics import KERNELS, arithmetic

from modeling_deepseek_v41.config import ModelConfig, RopeScaling, load_config
from modeling_deepseek_v41.rope import rope_table

DATA = Path(__file__).parent / "data"
TINY = load_config(DATA / "golden" / "tiny_a" / "ckpt")
CONFIGS = {
    "tiny": TINY,
    "release": load_config(DATA / "release_config.json"),
    "no scaling": dataclasses.replace(TINY, rope_scaling=None),
    "a ramp of one step": dataclasses.replace(TINY, rope_scaling=RopeScaling(4, 1, 1, 64)),
    "boundaries outside": dataclasses.replace(TINY, rope_scaling=RopeScaling(8, 1000, 1e-9, 64)),
    "two columns": dataclasses.replace(TINY, qk_rope_head_dim=2),
}
POSITIONS = 300


def angles(config: ModelConfig, compressed: bool) -> np.ndarray:
    """Angle per position of each pair [R/2], docs/model.md, section 4."""
    r = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    plain = np.array([theta ** (-2 * i / r) for i in range(r // 2)])
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return plain

    def dim(n: float) -> float:
        return r * math.log(scaling.original_max_position_embeddings / (2 * math.pi * n)) / (2 * math.log(theta))

    low, high = max(math.floor(dim(scaling.beta_fast)), 0), min(math.ceil(dim(scaling.beta_slow)), r - 1)
    ramp = np.array([min(max((i - low) / max(high - low, 0.001), 0), 1) for i in range(r // 2)])
    return plain * (1 - ramp + ramp / scaling.factor)


def turned(x: np.ndarray, config: ModelConfig, compressed: bool, position: int, back: bool) -> np.ndarray:
    """x [D] with its last R columns rotated, float64."""
    r = config.qk_rope_head_dim
    pairs = x[-r::2] + 1j * x[len(x) - r + 1 :: 2]
    pairs = pairs * np.exp((-1j if back else 1j) * position * angles(config, compressed))
    return np.concatenate([x[:-r], np.stack([pairs.real, pairs.imag], -1).reshape(-1)])


@KERNELS
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_pairs_of_the_last_columns_turn_as_complex_numbers(name: str, compressed: bool, back: bool, kernels: str) -> None:
    """An angle of up to 300 has an fp32 error of 3e-5 at most."""
    config, a = CONFIGS[name], arithmetic("fp32", kernels)
    table = rope_table(config, compressed, POSITIONS)
    width = config.qk_rope_head_dim + 6
    positions = [0, 1, 2, 63, 64, 127, 299]
    x = torch.randn(1, len(positions), 3, width, generator=torch.Generator().manual_seed(0))
    found = a.ops.rotate(x, table[positions].unsqueeze(0), a, back)
    for t, position in enumerate(positions):
        for head in range(3):
            expected = turned(x[0, t, head].double().numpy(), config, compressed, position, back)
            np.testing.assert_allclose(found[0, t, head].numpy(), expected, atol=3e-5 * (1 + position / 30))
    assert torch.equal(found[..., :6], x[..., :6])


@KERNELS
def test_a_latent_without_heads_turns_like_one_head(kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    table = rope_table(TINY, True, 9)[None, 3:8]
    x = torch.randn(1, 5, 48)
    assert torch.equal(a.ops.rotate(x, table, a), a.ops.rotate(x.unsqueeze(2), table, a).squeeze(2))


@KERNELS
def test_turning_back_undoes_the_turn(kernels: str) -> None:
    a = arithmetic("fp32", kernels)
    table = rope_table(TINY, False, 40)[None]
    x = torch.randn(1, 40, 2, 64)
    torch.testing.assert_close(a.ops.rotate(a.ops.rotate(x, table, a), table, a, back=True), x, rtol=1e-6, atol=1e-6)


@KERNELS
def test_position_0_changes_nothing_and_bf16_rounds_the_turned_columns_only(kernels: str) -> None:
    a = arithmetic("release", kernels)
    table = rope_table(TINY, False, 4)[None]
    x = torch.randn(1, 4, 48).bfloat16().float()
    found = a.ops.rotate(x, table, a)
    assert torch.equal(found[:, 0], x[:, 0])
    assert torch.equal(found, found.bfloat16().float())
    exact = a.ops.rotate(x, table, arithmetic("fp32", kernels))
    assert torch.equal(found, exact.bfloat16().float())


def test_the_two_families_differ() -> None:
    assert not torch.equal(rope_table(TINY, True, 8), rope_table(TINY, False, 8))
    plain = dataclasses.replace(TINY, rope_scaling=None, compress_rope_theta=TINY.rope_theta)
    assert torch.equal(rope_table(plain, True, 8), rope_table(TINY, False, 8))
