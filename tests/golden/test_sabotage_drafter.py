# SPDX-License-Identifier: Apache-2.0
"""Verification fails when something in the drafter is wrong, and says that it is the drafter: one tensor or rule at a time."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import altered_checkpoint, with_own_mix, zero
from driving import TINY
from torch import Tensor

from modeling_deepseek_v41.cli import main
from modeling_deepseek_v41.dspark.drafter import Drafter
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.verify import GoldenSet
from modeling_deepseek_v41.verify.drafts import check_drafts
from modeling_deepseek_v41.verify.golden_set import Prompt
from modeling_deepseek_v41.verify.report import DraftResult
from modeling_deepseek_v41.verify.run import teacher_forced

STEPS = 2
"""Steps that a wrong drafter is judged by, the first of each prompt: right after the prefill, and after one token."""


def load(folder: Path = TINY / "ckpt") -> DeepseekV41Model:
    return load_model(folder, "fp32", progress=False, drafter=True)


@functools.cache
def sound() -> DeepseekV41Model:
    """Shared by the tests, which leave it as it is."""
    return load()


def drafter_of(model: DeepseekV41Model) -> Drafter:
    assert model.drafter is not None
    return model.drafter


@functools.cache
def prompt() -> Prompt:
    """The first STEPS steps of p40."""
    whole = next(prompt for prompt in GoldenSet(TINY).prompts("f32", sound().config) if prompt.length == 40)
    golden = whole.drafts
    assert golden is not None and golden.logit_steps[:STEPS] == (0, 1)
    drafts = dataclasses.replace(
        golden, ids=golden.ids[:, :STEPS], confidence=golden.confidence[:, :STEPS], logits=golden.logits[:, :STEPS],
        logit_steps=(0, 1), recorded=golden.recorded[:, :STEPS],
    )  # fmt: skip
    return dataclasses.replace(whole, generated=whole.generated[:, :STEPS], logits=whole.logits[:, :STEPS], drafts=drafts)


def judged(model: DeepseekV41Model) -> DraftResult:
    """What verification says of the drafts of ``prompt``."""
    drafts = teacher_forced(model, prompt(), drafter=model.drafter).drafts
    golden = prompt().drafts
    assert golden is not None and drafts is not None
    return check_drafts(model, prompt(), "f32", golden, drafts)


def kinds() -> dict[str, list[str]]:
    """Every kind of parameter of the drafter: stage numbers do not make a kind, experts are taken together."""
    found: dict[str, list[str]] = {}
    for name, _ in drafter_of(sound()).named_parameters():
        found.setdefault(re.sub(r"^mtp\.\d+\.|\bexperts\.\d+\.", "", name), []).append(name)
    return found


def test_the_sound_drafter_passes() -> None:
    assert judged(sound()).ok


@pytest.mark.parametrize("kind", kinds())
def test_a_zeroed_tensor_shows(kind: str) -> None:
    """In the last stage that has it."""
    parameters = dict(drafter_of(sound()).named_parameters())
    parameter = parameters[kinds()[kind][-1]]
    kept = parameter.clone()
    parameter.zero_()
    try:
        assert not judged(sound()).ok
    finally:
        parameter.copy_(kept)


def taps_of_other_layers(drafter: Drafter) -> None:
    drafter.stages[0].main_proj.register_forward_pre_hook(lambda module, args: (args[0].roll(1, -1),))


def no_markov_head(drafter: Drafter) -> None:
    drafter.stages[-1].markov_head.head.register_forward_hook(lambda module, args, out: torch.zeros_like(out))


def confidence_behind_the_norm(drafter: Drafter) -> None:
    last = drafter.stages[-1]
    width = last.norm.weight.shape[0]

    def normed(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        return (torch.cat([last.norm(args[0][..., :width]), args[0][..., width:]], -1),)

    last.confidence_head.register_forward_pre_hook(normed)


def main_x_behind_attn_norm(drafter: Drafter) -> None:
    drafter.stages[0].main_norm.register_forward_hook(lambda module, args, out: drafter.stages[0].attn_norm(out))


def undelayed_mix(drafter: Drafter) -> None:
    for stage in drafter.stages:
        stage.register_forward_pre_hook(with_own_mix)


def no_sinks(drafter: Drafter) -> None:
    for stage in drafter.stages:
        stage.attn.attn_sink.fill_(-1e30)


RULES = [taps_of_other_layers, no_markov_head, confidence_behind_the_norm, main_x_behind_attn_norm, undelayed_mix, no_sinks]


@pytest.mark.parametrize("break_rule", RULES)
def test_a_wrong_rule_shows(break_rule: Callable[[Drafter], None]) -> None:
    model = load()
    break_rule(drafter_of(model))
    assert not judged(model).ok


@pytest.mark.parametrize(
    "config", [{"dspark_noise_token_id": 510}, {"dspark_target_layer_ids": [4, 5, 6]}, {"dspark_num_experts_per_tok": 1}]
)
def test_a_wrong_number_shows(config: dict[str, Any], tmp_path: Path) -> None:
    assert not judged(load(altered_checkpoint(TINY / "ckpt", tmp_path / "broken", **config))).ok


def flip(scale: Tensor) -> None:
    """Adds 1 to one scale byte: twice the value."""
    scale.view(torch.uint8)[0, 1] += 1


@pytest.mark.parametrize(
    ("name", "change", "kinds"),
    [
        ("mtp.1.attn.wo_b.weight", zero, {"drafter attn_out"}),
        ("mtp.0.attn.wkv.scale", flip, {"drafter attn_out", "drafter window_ring"}),
        ("mtp.2.markov_head.head.weight", zero, {"drafter confidence", "drafter ids"}),
    ],
)
def test_the_command_says_that_it_is_the_drafter(
    name: str, change: Callable[[Tensor], None], kinds: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = altered_checkpoint(TINY / "ckpt", tmp_path / "broken", {name: change})
    command = ["verify", "--model-path", str(broken), "--golden", str(TINY), "--mode", "f32", "--kernels", "auto"]
    assert main([*command, "--json"]) == 1
    (mode,) = json.loads(capsys.readouterr().out)["modes"]
    assert not mode["ok"] and not any(prompt["ok"] for prompt in mode["drafts"])
    assert all(part["ok"] for part in mode["prompts"] + mode["hashes"])
    assert {kind["kind"] for kind in mode["layers"][0]["kinds"] if not kind["ok"]} == kinds
