# SPDX-License-Identifier: Apache-2.0
"""Input that once hung, was misread or was ignored without a word: each is refused by name, or said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_deepseek_v41 import DeepseekV41ForCausalLM
from modeling_deepseek_v41.cli import main
from modeling_deepseek_v41.config import config_from_dict
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.errors import ConfigError, DeepseekV41Error, RequestError
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.request import Request
from modeling_deepseek_v41.sampling import SamplingOptions
from modeling_deepseek_v41.verify import GoldenSet

TINY = Path(__file__).parent / "data" / "golden" / "tiny_a"
CONFIG = json.loads((TINY / "ckpt" / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hc_sinkhorn_iters", 10**9),
        ("n_routed_experts", 3_000_000),
        ("dspark_n_routed_experts", 2**63),
        ("sliding_window", 10**9),
        ("candidate_block_size", 10**9),
        ("compress_rope_theta", 1),
        ("rope_theta", 10**31),
        ("rms_norm_eps", 1e308),
        ("hc_eps", 10**30),
        ("routed_scaling_factor", 1e308),
        ("max_position_embeddings", 10**30),
    ],
)
def test_numbers_that_no_model_has(key: str, value: float) -> None:
    raw = {**CONFIG, "text_config": {**CONFIG["text_config"], key: value}}
    with pytest.raises(ConfigError, match=key):
        config_from_dict(raw)


@pytest.mark.parametrize("key", ["beta_fast", "beta_slow", "factor"])
def test_rope_scaling_beyond_reason(key: str) -> None:
    scaling = {**CONFIG["text_config"]["rope_scaling"], key: 1e308}
    with pytest.raises(ConfigError, match=rf"rope_scaling\.{key}"):
        config_from_dict({**CONFIG, "text_config": {**CONFIG["text_config"], "rope_scaling": scaling}})


@pytest.mark.parametrize("options", [{"temperature": 1e-46}, {"temperature": 10**400}, {"top_k": 2**63}])
def test_sampling_options_beyond_fp32(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingOptions(**options)


@pytest.mark.parametrize("length", [1.5, "5", True, 0])
def test_max_seq_len_is_an_integer(length: Any) -> None:
    with pytest.raises(RequestError, match="max_seq_len"):
        load_model(TINY / "ckpt", max_seq_len=length, progress=False)


def test_long_path_and_deep_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / "config.json"
    deep.write_text("[" * 200_000, encoding="utf-8")
    for path in ("x" * 300, str(tmp_path)):
        assert main(["inspect", path]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_requests_from_a_generator() -> None:
    engine = Engine(load_model(TINY / "ckpt", progress=False), max_batch=2)
    assert len(engine.generate(Request([0, token], 2) for token in (5, 6))) == 2


def test_ignored_sampling_options_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model-path", str(TINY / "ckpt"), "--prompt", "x", "--max-new-tokens", "1", "--top-p", "0.3"]
    assert main(arguments) == 0
    assert "--top-p and --seed have no effect at --temperature 0" in capsys.readouterr().err


def test_nan_logits_stop_generate(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY / "ckpt", tmp_path / "ckpt", copy_function=shutil.copyfile)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    shard = folder / index["layers.1.engram.embed.weight"]
    tensors = load_file(shard)
    tensors["layers.1.engram.embed.weight"].view(torch.uint8).fill_(0x7F)
    save_file(tensors, shard)
    model = DeepseekV41ForCausalLM.from_pretrained(folder, numerics="fp32")
    with pytest.raises(DeepseekV41Error, match="not finite"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)


def test_a_partly_copied_golden_set_is_said(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "set", ignore=shutil.ignore_patterns("ckpt"), copy_function=shutil.copyfile)
    tensors = load_file(folder / "golden_f32.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("p17.") and key != "p1.input_ids"}
    save_file(kept, folder / "golden_f32.safetensors")
    assert GoldenSet(folder).missing_prompts("f32") == ["p1", "p17"]
    assert GoldenSet(TINY).missing_prompts("f32") == []
