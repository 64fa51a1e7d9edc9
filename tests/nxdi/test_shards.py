# SPDX-License-Identifier: Apache-2.0
"""The files that a Neuron machine loads its weights from, and the configuration in the compiled folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import TINY, child
from test_graphs import WIDE
from texts import GOLDEN, engine, golden

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.layout import make_layout
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.sharding import shard_checkpoint
from modeling_deepseek_v41.state import allocate

pytestmark = pytest.mark.nxdi
FUSED = {"on_device_sampling_config": {}, "enable_fused_speculation": True, "speculation_length": 6}


def shards(options: dict[str, Any], work: Path, text: list[int], new: list[int], **more: Any) -> torch.Tensor:
    """The logits in front of the tokens ``new`` behind ``text`` of modules that loaded the written files strictly."""
    run = {"on_device_sampling_config": {}, "max_context_length": 64} | options
    arguments = {"options": run, "work": str(work), "text": text, "new": new} | more
    [found] = child("shards", arguments, work, cpu_mode=False)
    assert found["bad"] == [] and found["same_config"]
    return torch.load(work / "logits.pt")


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_rank_files_load_strictly_and_give_the_golden_logits(tp: int, fused: bool, tmp_path: Path) -> None:
    (prompt,), (text,) = golden([40])
    found = shards({"tp_degree": tp} | (FUSED if fused else {}), tmp_path, prompt, text[:8])
    assert close(found, GOLDEN["p40.logits"][0, :8])


def test_a_folder_of_rank_files_takes_the_checkpoint_s_place(tmp_path: Path) -> None:
    """As ``deepseek-v41 shard`` makes it: nobody shards twice."""
    folder = tmp_path / "ranks"
    shard_checkpoint(TINY / "ckpt", folder, make_layout(load_config(TINY / "ckpt"), 1), "fp32", "fp8_exact", progress=False)
    prompts, expected = golden([17])
    [found] = child("generate", {"options": FUSED, "texts": prompts, "folder": str(folder)}, tmp_path)
    assert found["tokens"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FUSED], ids=["plain", "fused"])
def test_rank_files_of_64_ranks_give_the_logits_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """Without the caches' QDQ, where a sum in another order may round a value the other way."""
    config = json.loads((TINY / "ckpt" / "config.json").read_text())
    config["text_config"] |= WIDE
    folder = tmp_path / "ckpt"
    write_checkpoint(config, folder, seed=3, tokenizer=TINY / "ckpt")
    (prompt,), _ = golden([40])
    [text] = engine(folder, [prompt], fused=False).texts
    found = shards({"tp_degree": 64} | options, tmp_path, prompt, text[:4], folder=str(folder), qdq=False)
    model = load_model(folder, "fp32_no_qdq", 256, kernels="torch", progress=False)
    ids, zero = torch.tensor([prompt + text[:3]]), torch.zeros(1, dtype=torch.int64)
    state = allocate(model.state_spec(1))
    with torch.inference_mode():
        hidden, *_ = model(ids, zero, torch.tensor([ids.shape[1]]), zero, zero, *state, read_len=256)
        expected = model.logits(hidden)[0, len(prompt) - 1 :]
    assert close(found, expected)
