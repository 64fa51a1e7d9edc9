# SPDX-License-Identifier: Apache-2.0
"""to_cpu() and generation on NxD's and NxDI's own code: token for token the reference's, in every way a batch can be run."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sources import TINY, child, needs_nxdi

from modeling_deepseek_v41.dspark.options import Speculation
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.request import Request

pytestmark = needs_nxdi
GOLDEN = load_file(TINY / "golden_f32.safetensors")
ON_DEVICE = {"on_device_sampling_config": {}}
FUSED = ON_DEVICE | {"enable_fused_speculation": True, "speculation_length": 6}
CONTINUOUS = {"batch_size": 4, "ctx_batch_size": 1, "is_continuous_batching": True}
MIXED = [1, 40, 17, 100]
"""A batch with a one-token row; where the largest bucket is 40, a row of its size and one of three chunks."""

RUNS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "plain": ({"batch_size": 4}, 1, False),
    "plain, adapter": ({"batch_size": 4}, 1, True),
    "chunks": ({"batch_size": 4, "max_context_length": 40}, 1, False),
    "buckets": (
        CONTINUOUS | {"enable_bucketing": True, "context_encoding_buckets": [16, 40], "token_generation_buckets": [64, 256]},
        1,
        True,
    ),
    "continuous": (CONTINUOUS, 1, True),
    "continuous, on-device sampling and logits": (CONTINUOUS | ON_DEVICE | {"output_logits": True}, 1, True),
    "continuous, fused, chunks": (CONTINUOUS | FUSED | {"max_context_length": 40}, 1, False),
    "fused and logits": (FUSED | {"batch_size": 4, "output_logits": True}, 1, False),
    "tp 2": (CONTINUOUS | {"tp_degree": 2, "max_context_length": 40}, 2, False),
    "tp 2, attention 1": ({"batch_size": 4, "tp_degree": 2, "attn_tp_degree": 1}, 2, False),
    "tp 2, fused": (CONTINUOUS | FUSED | {"tp_degree": 2}, 2, False),
    "tp 2, on-device sampling, adapter": (CONTINUOUS | ON_DEVICE | {"tp_degree": 2}, 2, True),
}
MANY_RANKS: dict[str, dict[str, Any]] = {
    "tp 8": CONTINUOUS | {"tp_degree": 8, "max_context_length": 40},
    "tp 8, attention 4, experts 4 x 2, fused": CONTINUOUS
    | FUSED
    | {"tp_degree": 8, "attn_tp_degree": 4, "moe_ep_degree": 4, "moe_tp_degree": 2},
    "tp 8, attention 2": CONTINUOUS | {"tp_degree": 8, "attn_tp_degree": 2},
}


def expected(lengths: list[int]) -> list[list[int]]:
    return [GOLDEN[f"p{length}.generated"][0].tolist() for length in lengths]


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_the_reference_s(name: str, tmp_path: Path) -> None:
    options, ranks, adapter = RUNS[name]
    arguments = {"options": options, "lengths": MIXED, "adapter": adapter}
    for found in child("generate", arguments, tmp_path, ranks=ranks):
        assert found["tokens"] == expected(MIXED)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY_RANKS)
def test_tokens_of_many_ranks_are_the_reference_s(name: str, tmp_path: Path) -> None:
    options = MANY_RANKS[name]
    for found in child("generate", {"options": options, "lengths": MIXED}, tmp_path, ranks=8):
        assert found["tokens"] == expected(MIXED)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_fused_speculation_through_the_adapter(length: int, tmp_path: Path) -> None:
    options = FUSED | {"max_context_length": 40}
    [found] = child("generate", {"options": options, "lengths": [length], "adapter": True}, tmp_path)
    assert found["tokens"] == expected([length])


def test_acceptance_is_the_engine_s(tmp_path: Path) -> None:
    model = load_model(TINY / "ckpt", "fp32", progress=False, drafter=True)
    engine = Engine(model, speculation=Speculation())
    engine.generate([Request(GOLDEN["p40.input_ids"][0].tolist(), max_new_tokens=25)])
    [found] = child("generate", {"options": FUSED, "lengths": [40]}, tmp_path)
    assert engine.stats.speculation is not None
    assert found["counts"]["fused_speculation_model"]["calls"] == engine.stats.speculation.steps


def test_shorter_drafts(tmp_path: Path) -> None:
    [found] = child("generate", {"options": FUSED | {"speculation_length": 3}, "lengths": [17]}, tmp_path)
    assert found["tokens"] == expected([17])
