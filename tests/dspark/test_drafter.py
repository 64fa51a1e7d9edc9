# SPDX-License-Identifier: Apache-2.0
"""Loading the drafter, its state, how many drafts it makes, and that all of it counts."""

import re
from pathlib import Path

import pytest
import torch
from long_context import long_model
from safetensors.torch import load_file, save_file
from speculating import Session, plain
from torch import Tensor

from modeling_deepseek_v41.checkpoint.spec import expected_tensors, is_vision
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import CheckpointError, RequestError
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"
FP32 = pytest.mark.parametrize("numerics", ["fp32"])


@FP32
def test_shorter_drafts_are_the_first_of_the_block(model: DeepseekV41Model, prompts: list[Tensor]) -> None:
    session = Session(model)
    token, start = session.read(prompts[2]).argmax(), prompts[2].numel()
    full = session.propose(token, start)
    for count in range(1, 6):
        some = session.propose(token, start, count)
        assert torch.equal(some.ids, full.ids[:, :count]) and torch.equal(some.logits, full.logits[:, :count])
        assert torch.equal(some.confidence, full.confidence[:, :count])


@FP32
@pytest.mark.parametrize("count", [0, 6, -1, True, 2.0])
def test_other_numbers_of_drafts_are_refused(model: DeepseekV41Model, prompts: list[Tensor], count: int) -> None:
    message = re.escape(f"num_draft_tokens: expected 1 to 5, found {count!r}; the drafter was trained on blocks of")
    with pytest.raises(RequestError, match=message):
        Session(model).propose(torch.tensor(3), 1, count)


@FP32
def test_its_state_stands_behind_the_backbones(model: DeepseekV41Model, folder: Path) -> None:
    without = load_model(folder, "fp32", kernels="torch", progress=False)
    assert without.drafter is None
    assert model.state_names == [*without.state_names, "mtp.swa.0", "mtp.swa.1", "mtp.swa.2"]
    assert model.state_spec(3)[: len(without.state_names)] == without.state_spec(3)


@FP32
def test_a_drafter_changes_nothing_in_the_backbone(model: DeepseekV41Model, prompts: list[Tensor]) -> None:
    session, idle = Session(model), Session(model)
    logits = session.read(prompts[3])
    before = [state.clone() for state in session.state]
    session.propose(logits.argmax(), 40)
    assert all(torch.equal(state, old) for state, old in zip(session.state, before, strict=True)), "a proposal writes nothing"
    assert torch.equal(logits, idle.read(prompts[3]))


def test_every_tensor_of_the_drafter_is_read_and_counts(folder: Path, tmp_path: Path) -> None:
    """Each kind of mtp tensor zeroed in turn changes draft logits or confidence."""
    model = load_model(folder, "fp32", progress=False, drafter=True)
    assert model.drafter is not None
    expected = outputs(model)
    names = [name for name in expected_tensors(load_config(folder)) if name.startswith("mtp.") and not is_vision(name)]
    assert len(names) > 100
    parameters = dict(model.drafter.named_parameters())
    for name, parameter in parameters.items():
        kept = parameter.clone()
        parameter.zero_()
        assert any(not torch.equal(new, old) for new, old in zip(outputs(model), expected, strict=True)), name
        parameter.copy_(kept)
    assert all(torch.equal(new, old) for new, old in zip(outputs(model), expected, strict=True))


def outputs(model: DeepseekV41Model) -> list[Tensor]:
    """Draft logits and confidence after a prompt of 24 tokens, whose drafts use every stage."""
    session = Session(model)
    ids = torch.randint(model.config.vocab_size, (24,), generator=torch.Generator().manual_seed(3))
    session.read(ids)
    drafts = session.propose(ids[0], 24)
    return [drafts.logits, drafts.confidence]


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_loading_is_strict(folder: Path, tmp_path: Path, change: str) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        stored = load_file(file) if file.suffix == ".safetensors" else {}
        if "mtp.1.attn.wkv.weight" in stored and change == "missing":
            del stored["mtp.1.attn.wkv.weight"]
            save_file(stored, broken / file.name)
        elif "mtp.1.attn.wkv.weight" in stored:
            save_file(stored | {"mtp.1.norm.weight": torch.zeros(128, dtype=torch.bfloat16)}, broken / file.name)
        elif file.name != "model.safetensors.index.json":
            (broken / file.name).symlink_to(file)
    index = (folder / "model.safetensors.index.json").read_text(encoding="utf-8")
    entry = re.search(r'"mtp\.1\.attn\.wkv\.weight": *"([^"]*)",', index)
    assert entry is not None
    replacement = "" if change == "missing" else entry[0] + f'"mtp.1.norm.weight": "{entry[1]}",'
    (broken / "model.safetensors.index.json").write_text(index.replace(entry[0], replacement), encoding="utf-8")
    for drafter in (False, True):
        with pytest.raises(CheckpointError, match=r"mtp\.1\.(attn\.wkv|norm)\.weight"):
            load_model(broken, "fp32", kernels="torch", progress=False, drafter=drafter)


@pytest.mark.parametrize("numerics", ["fp32_no_qdq"])
@pytest.mark.parametrize("depth", [16, 40])
def test_drafts_do_not_depend_on_how_the_text_was_read(model: DeepseekV41Model, prompts: list[Tensor], depth: int) -> None:
    assert_same_at_depth(model, prompts[1], depth)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [256, 2048])
def test_drafts_do_not_depend_on_depth(tmp_path: Path, prompts: list[Tensor], depth: int) -> None:
    assert_same_at_depth(long_model("fp32_no_qdq", "auto", tmp_path), prompts[1], depth)


def assert_same_at_depth(model: DeepseekV41Model, prompt: Tensor, depth: int) -> None:
    """Drafts at ``depth`` after one-by-one steps are those after a fresh prefill of the same text; no QDQ, so 1e-4."""
    text = torch.cat([prompt, plain(model, prompt, depth + 1 - prompt.numel())])
    stepped, fresh = Session(model), Session(model)
    stepped.read(text[: prompt.numel()])
    for position in range(prompt.numel(), depth):
        stepped.read(text[position : position + 1], position)
    fresh.read(text[:depth])
    found, expected = stepped.propose(text[depth], depth), fresh.propose(text[depth], depth)
    assert torch.equal(found.ids, expected.ids)
    error = (found.logits - expected.logits).abs().amax(-1) / expected.logits.abs().amax(-1)
    assert error.max() < 1e-4
