# SPDX-License-Identifier: Apache-2.0
"""Configurations that no golden set has, against the model of docs/model.md written a second time in float64 (naive.py).

In fp32_no_qdq, where nothing is rounded, so that 1e-5 holds for every row: summation order alone is between the two.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from driving import KERNELS, TINY, Session, largest_error, tokens
from naive import NaiveModel
from own_set import SMALL, WITH_ALL
from random_shapes import random_config

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.verify import GoldenSet

LENGTH = 45
SIZES = [7, 11, 3, 13, 11]
TOLERANCE = 1e-5


def check(folder: Path, seed: int, kernels: str) -> None:
    """One shot, token by token and in chunks."""
    model = load_model(folder, "fp32_no_qdq", kernels=kernels, progress=False)
    ids = tokens(model, LENGTH, seed)
    expected = torch.from_numpy(NaiveModel(folder).logits(ids.tolist()))
    for sizes in ([LENGTH], [1] * LENGTH, SIZES):
        assert largest_error(Session(model).chunks(ids, sizes).double(), expected) < TOLERANCE, sizes


def test_the_naive_model_gives_the_golden_logits() -> None:
    """So that it may judge: p100 and p17 have no tie in f32_noq."""
    naive, golden = NaiveModel(TINY / "ckpt"), GoldenSet(TINY)
    for prompt in golden.prompts("f32_noq", naive.c):
        if prompt.tie_from is None:
            ids = torch.cat([prompt.input_ids[0], prompt.generated[0, :-1]])
            found = torch.from_numpy(naive.logits(ids.tolist()))[prompt.length - 1 :]
            assert largest_error(found, prompt.logits[0]) < 1e-6


NAMED: dict[str, dict[str, Any]] = {
    "hc 2, ratio 4, no engram, no candidates": SMALL,
    "hc 3, ratios 1 and 3, engram at layer 0, candidates": WITH_ALL,
    "one stream": SMALL | {"hc_mult": 1},
    "a window of one": WITH_ALL | {"sliding_window": 1},
    "one expert": SMALL | {"n_routed_experts": 1, "num_experts_per_tok": 1},
    "no drafter": SMALL | {"num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 4, 0, 4], "dspark_block_size": 0},
    "no compression": SMALL | {"compress_ratios": [0] * 7, "kv_source_layer_ids": [], "index_source_layer_ids": []},
    "candidates from a layer without keys of its own": SMALL
    | {"compress_ratios": [1, 1, 1, 1, 1, 0, 0], "kv_source_layer_ids": [0, 3], "index_source_layer_ids": [0, 2, 3, 4]}
    | {"candidate_source_layer_id": 2, "candidate_topk_blocks": 2, "candidate_block_size": 3},
    "engrams in descending order": WITH_ALL | {"engram_layer_ids": [3, 0]},
}


@KERNELS
@pytest.mark.parametrize("name", NAMED)
def test_a_named_shape(name: str, kernels: str, tmp_path: Path) -> None:
    write_checkpoint(NAMED[name], tmp_path / "ckpt", seed=1)
    check(tmp_path / "ckpt", 1, kernels)


@KERNELS
@pytest.mark.parametrize("seed", range(6))
def test_a_random_shape(seed: int, kernels: str, tmp_path: Path) -> None:
    write_checkpoint(random_config(seed), tmp_path / "ckpt", seed)
    check(tmp_path / "ckpt", seed, kernels)


@KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 60))
def test_more_random_shapes(seed: int, kernels: str, tmp_path: Path) -> None:
    write_checkpoint(random_config(seed), tmp_path / "ckpt", seed)
    check(tmp_path / "ckpt", seed, kernels)
