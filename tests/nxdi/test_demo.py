# SPDX-License-Identifier: Apache-2.0
"""The command line: checks, generation and measuring on a CPU; what cannot be served is said before anything is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from sources import TINY, run
from transformers import AutoTokenizer, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from modeling_deepseek_v41.hf.modeling import DeepseekV41ForCausalLM

pytestmark = pytest.mark.nxdi
COMMON = ["run", "--compiled-model-path", "out", "--torch-dtype", "float32", "--max-context-length", "64", "--seq-len", "64"]
COMMON += ["--on-cpu", "--prompt", "Hello world", "--batch-size", "1"]
FUSED = ["--on-device-sampling", "--enable-fused-speculation", "--speculation-length", "6"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The golden checkpoint with a generation_config.json."""
    shutil.copytree(TINY / "ckpt", tmp_path / "ckpt")
    GenerationConfig(eos_token_id=1, bos_token_id=0, pad_token_id=2).save_pretrained(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def demo(folder: Path, *options: str, ranks: int = 1) -> tuple[int, str]:
    command = ["-m", "modeling_deepseek_v41.inference_demo", *COMMON, "--model-path", str(folder), *options]
    done = run(command, folder.parent, ranks=ranks)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--check-accuracy-mode", "logit-matching", "--num-tokens-to-check", "20"],
        ["--check-accuracy-mode", "logit-matching", "--output-logits", *FUSED],
        ["--check-accuracy-mode", "token-matching", "--num-tokens-to-check", "40", *FUSED],
        ["--check-accuracy-mode", "token-matching", "--moe-tp-degree", "1", "--moe-ep-degree", "1"],
    ],
    ids=["logits", "fused logits", "fused tokens", "tokens"],
)
def test_accuracy_checks_pass(options: list[str], folder: Path) -> None:
    code, text = demo(folder, *options)
    assert code == 0, text[-3000:]
    assert "logit validation passed" in text or "is accurate" in text


def test_two_ranks(folder: Path) -> None:
    code, text = demo(folder, "--check-accuracy-mode", "token-matching", "--tp-degree", "2", ranks=2)
    assert code == 0 and "is accurate" in text, text[-3000:]


def test_benchmark_counts_steps(folder: Path) -> None:
    code, text = demo(folder, "--benchmark", "--benchmark-report-path", "report.json", *FUSED)
    assert code == 0, text[-3000:]
    report = json.loads((folder.parent / "report.json").read_text())
    steps = report["graph_calls"]["fused_speculation_model"]
    assert report["e2e_model"]["latency_ms_p50"] > 0 and steps["calls"] > 0 and 1 <= steps["tokens_per_row"] <= 6


def test_a_wrong_weight_fails(folder: Path) -> None:
    model = DeepseekV41ForCausalLM.from_pretrained(folder, numerics="fp32")
    prompt = AutoTokenizer.from_pretrained(folder)("Hello world", return_tensors="pt").input_ids
    model.get_output_embeddings().weight.data[300:] = 0
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True}
    found = model.generate(prompt, **options)
    torch.save(GenerateDecoderOnlyOutput(sequences=found.sequences, scores=found.scores), folder.parent / "expected.pt")
    code, text = demo(folder, "--check-accuracy-mode", "logit-matching", "--num-tokens-to-check", "4",
                      "--expected-outputs-path", "expected.pt")  # fmt: skip
    assert code == 1 and "FAILED" in text


def test_what_cannot_be_served_is_refused_together(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    code, text = demo(folder, "--quantized", "--fused-qkv", "--padding-side", "left", "--enable-eagle-speculation")
    assert code == 2 and "5 option(s)" in text
    for name in ("quantized", "fused_qkv", "padding_side", "enable_eagle_speculation", "generation_config.json"):
        assert name in text
    assert "Loading" not in text
