# SPDX-License-Identifier: Apache-2.0
"""Verification of the drafter: sets of another shape, with and without drafts, what fails and what cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_set import SMALL, change, make_set, run
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.verify import GoldenError, GoldenSet, check_mode, verify
from modeling_deepseek_v41.verify.compare import relative_error
from modeling_deepseek_v41.verify.qdq_trace import QdqTrace
from modeling_deepseek_v41.verify.run import teacher_forced

LENGTHS = (1, 7)
LAYERS = "layers_p7_{}.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two stages, blocks of 3, batch 2, drafts of 5 steps, layers of the longer prompt."""
    return make_set(tmp_path_factory.mktemp("drafts"), SMALL, 2, LENGTHS, layers_of=7, drafts=True)


def test_a_sound_set_passes(made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*made) == 0
    text = capsys.readouterr().out
    assert "drafts, of the prefill and of every step" in text and "drafter attn_out" in text
    assert "FAILED" not in text and "drafts: " not in text
    report = verify(*made, progress=False)
    assert [[(row.prompt, row.steps, row.counted) for row in mode.drafts] for mode in report.modes] == [
        [("p1", 10, 8), ("p7", 10, 10)]
    ] * 3


def test_json_is_the_report(made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*made, "--mode", "ref", "--json") == 0
    (mode,) = json.loads(capsys.readouterr().out)["modes"]
    errors = {"logits_error_median", "logits_error_max", "confidence_error_max"}
    assert set(mode["drafts"][1]) == {"prompt", "steps", "counted", "ids_equal", "ok", "note", *errors}
    assert mode["drafts"][1]["ids_equal"] == 10 and mode["drafts"][0]["note"] == "none recorded at position 0"


def test_a_checkpoint_without_drafter_is_said(tmp_path: Path) -> None:
    """The set's drafts belong to a drafter that this checkpoint does not have."""
    without = SMALL | {"num_nextn_predict_layers": 0, "compress_ratios": SMALL["compress_ratios"][:5]}
    checkpoint, golden = make_set(tmp_path, without, 1, (5,), layers_of=5)
    assert verify(checkpoint, golden, progress=False).ok
    file = golden / "golden_f32.safetensors"
    save_file(load_file(file) | {"p5.draft_ids": torch.zeros(1, 5, 4, dtype=torch.int64)}, file)
    file = golden / LAYERS.replace("7", "5").format("f32")
    save_file(load_file(file) | {"draft1.mtp.0.x_out": torch.zeros(1, 3, 2, 64)}, file)
    report = verify(checkpoint, golden, "f32", progress=False)
    assert report.ok and not report.modes[0].drafts
    assert any("num_nextn_predict_layers" in words and "is 0" in words for words in report.modes[0].left_out)


def test_what_a_set_does_not_hold_is_said(own: tuple[Path, Path]) -> None:
    checkpoint, golden = own
    for kind in ("draft_ids", "draft_logits", "draft_confidence"):
        change(golden / "golden_f32.safetensors", f"p7.{kind}", lambda tensor: None)
    change(golden / "golden_ref.safetensors", "p7.main_hidden", lambda tensor: None)
    facts = json.loads((golden / "golden.json").read_text(encoding="utf-8"))
    del facts["draft_logit_steps"], facts["prompts"]["1"]["draft_noise_ids_agree"]
    (golden / "golden.json").write_text(json.dumps(facts), encoding="utf-8")
    report = verify(checkpoint, golden, progress=False)
    f32, _, ref = report.modes
    assert report.ok and "drafts of p7: the set has none" in f32.left_out
    (prompt,) = f32.drafts
    assert prompt.logits_error_max is None and "golden.json records no draft_logit_steps" in prompt.note
    notes = [(row.counted, row.note) for row in ref.drafts]
    assert notes[0] == (0, "golden.json records no draft_noise_ids_agree: no id judged")
    assert notes[1] == (0, "the set has no main_hidden to draft from: no id judged")


def test_a_model_without_its_drafter_is_said(made: tuple[Path, Path]) -> None:
    result = check_mode(load_model(made[0], "fp32", progress=False), GoldenSet(made[1]), "f32")
    assert result.ok and "drafts: not checked, the model was loaded without its drafter" in result.left_out


def scaled(at: tuple[int, ...], factor: float) -> Callable[[Tensor], Tensor]:
    """Moves the largest value of one row."""

    def edit(tensor: Tensor) -> Tensor:
        row = tensor[at]
        row[row.abs().argmax()] *= factor
        return tensor

    return edit


def other_id(tensor: Tensor) -> Tensor:
    tensor[1, 3, 2] = (tensor[1, 3, 2] + 1) % SMALL["vocab_size"]
    return tensor


FAULTS: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    (mode, key, edit)
    for mode, factor in (("f32", 1.1), ("f32_noq", 1.00003))
    for key, edit in (
        ("draft_ids", other_id), ("draft_logits", scaled((1, 2, 1), factor)), ("draft_confidence", scaled((0, 4), factor)),
        ("draft_confidence", lambda tensor: tensor * torch.nan),
    )
] + [("ref", "draft_ids", other_id)]  # fmt: skip


@pytest.mark.parametrize(("mode", "key", "edit"), FAULTS)
def test_a_draft_that_differs_fails(own: tuple[Path, Path], mode: str, key: str, edit: Callable[[Tensor], Tensor]) -> None:
    change(own[1] / f"golden_{mode}.safetensors", f"p7.{key}", edit)
    (result,) = verify(*own, mode, progress=False).modes
    assert [row.prompt for row in result.drafts if not row.ok] == ["p7"]
    assert not result.ok and all(row.ok for row in (*result.prompts, *result.layers))


def test_noise_and_ties_leave_steps_out(own: tuple[Path, Path]) -> None:
    checkpoint, golden = own
    facts = json.loads((golden / "golden.json").read_text(encoding="utf-8"))
    facts["prompts"]["7"]["draft_noise_ids_agree"][1][3] = 0.5
    facts["noq_ties"] = {"7": {"layer": 1, "position": 9, "rows_from": 3}}
    (golden / "golden.json").write_text(json.dumps(facts), encoding="utf-8")
    for mode in ("f32_noq", "ref"):
        change(golden / f"golden_{mode}.safetensors", "p7.draft_ids", other_id)
        (result,) = verify(checkpoint, golden, mode, progress=False).modes
        assert result.ok and result.drafts[1].counted == (6 if mode == "f32_noq" else 9)


DRAFTER_KINDS = [
    "attn_out", "ffn_out", "x_out", "pre_out", "gate_indices", "gate_weights", "window_ring", "ids", "confidence",
]  # fmt: skip


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
@pytest.mark.parametrize("mode", ["f32", "ref"])
def test_a_kind_that_differs_fails(own: tuple[Path, Path], mode: str, kind: str) -> None:
    """One tensor of the last stage, moved by one row; ids and confidence by one draft."""
    file = own[1] / LAYERS.format(mode)
    (key,) = (key for key in load_file(file) if key in (f"draft1.mtp.1.{kind}", f"prefill.mtp.1.{kind}", f"draft1.{kind}"))
    change(file, key, lambda tensor: tensor.roll(1, 0 if kind.startswith("gate_") else 1))
    (result,) = verify(*own, mode, progress=False).modes
    assert all(row.ok for row in (*result.prompts, *result.drafts)) and not result.ok
    assert f"drafter {kind}" in {entry.kind for entry in result.layers[0].kinds if not entry.ok}


def test_a_tensor_that_no_stage_gives_fails(own: tuple[Path, Path]) -> None:
    file = own[1] / LAYERS.format("ref")
    save_file(load_file(file) | {"draft9.ids": torch.zeros(1, 4, dtype=torch.int64)}, file)
    report = verify(*own, "ref", progress=False)
    assert not report.ok and report.modes[0].layers[0].unused == ["draft9.ids"]


def test_a_qdq_flip_of_a_draft_is_shown_and_accepted(own: tuple[Path, Path]) -> None:
    """The golden as an implementation would give it whose value of a draft block fell on the other side of a boundary."""
    checkpoint, golden = own
    model = load_model(checkpoint, "fp32", progress=False, drafter=True)
    prompt = GoldenSet(golden).prompts("f32", model.config)[-1]
    assert prompt.drafts is not None
    with QdqTrace(model) as trace:
        teacher_forced(model, prompt, drafter=model.drafter)
        for flip in sorted(flip for flip in trace.near if flip.kind == "draft window KV"):
            trace.forced = {flip}
            drafts = teacher_forced(model, prompt, drafter=model.drafter).drafts
            assert drafts is not None
            if 1e-4 < relative_error(drafts.confidence, prompt.drafts.confidence)[prompt.drafts.recorded].max() < 1e-2:
                break
        else:
            pytest.fail("no flip of this set shows: choose another seed")
    change(golden / "golden_f32.safetensors", "p7.draft_confidence", lambda tensor: drafts.confidence.clone())
    change(golden / "golden_f32.safetensors", "p7.draft_logits", lambda tensor: drafts.logits[:, [0, 2, 4]].clone())
    (result,) = verify(checkpoint, golden, "f32", progress=False).modes
    assert result.ok and f"{flip.block} draft window KV at position {flip.position}" in result.drafts[1].note
    change(golden / "golden_f32.safetensors", "p7.draft_confidence", scaled((0, 4), 1.001))
    (result,) = verify(checkpoint, golden, "f32", progress=False).modes
    assert not result.drafts[1].ok and result.drafts[1].note == "not explained by QDQ rounding flips"


F32, REF = "golden_f32.safetensors", "golden_ref.safetensors"
ERRORS: list[tuple[str, str, str, Callable[[Tensor], Tensor | None], str]] = [
    ("no ids", F32, "p7.draft_ids", lambda ids: None, "p7.draft_ids is missing"),
    ("no logits", F32, "p7.draft_logits", lambda logits: None, "p7.draft_logits is missing"),
    ("no confidence", F32, "p1.draft_confidence", lambda confidence: None, "p1.draft_confidence is missing"),
    ("shorter blocks", F32, "p7.draft_ids", lambda ids: ids[..., :3], "p7.draft_ids has shape [2, 5, 3]"),
    ("fewer steps", F32, "p7.draft_confidence", lambda tensor: tensor[:, :4], "p7.draft_confidence has shape [2, 4, 3]"),
    ("logits of other steps", F32, "p7.draft_logits", lambda tensor: tensor[:, :2], "p7.draft_logits has shape [2, 2, 3, 320]"),
    ("another vocabulary", F32, "p7.draft_logits", lambda tensor: tensor[..., :9], "p7.draft_logits has shape [2, 3, 3, 9]"),
    ("an id too large", F32, "p7.draft_ids", lambda ids: ids + 320, "p7.draft_ids holds id"),
    ("a step without ids", F32, "p7.draft_ids", lambda ids: ids.index_fill(1, torch.tensor([2]), -1), "no token ids at step 2"),
    ("other taps", REF, "p7.main_hidden", lambda taps: taps[:, :3], "p7.main_hidden has shape [2, 3, 128]"),
    ("ids of layers", LAYERS.format("f32"), "draft1.ids", lambda ids: ids[:, :2], "draft1.ids has shape [2]"),
    ("a stage's width", LAYERS.format("f32"), "draft1.mtp.1.ffn_out", lambda x: x[..., :8], "mtp.1.ffn_out has shape [3, 8]"),
    ("a stage's streams", LAYERS.format("f32"), "draft1.mtp.1.x_out", lambda x: x[..., :1, :], "1.x_out has streams"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "key", "edit", "words"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_what_cannot_be_read_is_named(
    own: tuple[Path, Path], file: str, key: str, edit: Callable[[Tensor], Tensor | None], words: str
) -> None:
    change(own[1] / file, key, edit)
    with pytest.raises(GoldenError) as caught:
        verify(*own, "ref" if "ref" in file else "f32", progress=False)
    assert words in str(caught.value) and str(own[1] / file) in str(caught.value)


@pytest.mark.parametrize("steps", [3, [0, 2, 5], [0, True, 4], ["0", "2", "4"]])
def test_steps_of_logits_that_cannot_be(own: tuple[Path, Path], steps: Any) -> None:
    facts = json.loads((own[1] / "golden.json").read_text(encoding="utf-8"))
    (own[1] / "golden.json").write_text(json.dumps(facts | {"draft_logit_steps": steps}), encoding="utf-8")
    with pytest.raises(GoldenError, match=r"golden\.json: draft_logit_steps: expected a list of steps, each 0 to 4"):
        verify(*own, "f32", progress=False)


def test_a_stage_that_the_checkpoint_does_not_have(own: tuple[Path, Path]) -> None:
    file = own[1] / LAYERS.format("f32")
    save_file(load_file(file) | {"draft1.mtp.2.x_out": torch.zeros(1, 3, 2, 64)}, file)
    with pytest.raises(GoldenError, match=r"has stage mtp\.2, num_nextn_predict_layers of .* is 2"):
        verify(*own, "f32", progress=False)
