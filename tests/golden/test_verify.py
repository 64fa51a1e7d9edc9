# SPDX-License-Identifier: Apache-2.0
"""Verification itself: sets of other shapes, faults that it must find, flips and ties that it must explain, user errors."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_set import SMALL, WITH_ALL, change, layer_tensors, make_set, run
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling_deepseek_v41.kernels.dispatch import TORCH, register
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.numerics import Arithmetic
from modeling_deepseek_v41.projections import Projected, query_projection
from modeling_deepseek_v41.verify import GoldenError, GoldenSet, check_mode, verify
from modeling_deepseek_v41.verify.check import check_layer_files
from modeling_deepseek_v41.verify.compare import within
from modeling_deepseek_v41.verify.index_ties import tied_rows
from modeling_deepseek_v41.verify.qdq_trace import QdqTrace
from modeling_deepseek_v41.verify.run import teacher_forced

LENGTHS = (1, 7, 26)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The set without engram and candidates, batch 2, layers of the longest prompt."""
    return make_set(tmp_path_factory.mktemp("small"), SMALL, 2, LENGTHS, layers_of=26)


def test_a_set_without_engram_and_candidates_passes(made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*made) == 0
    text = capsys.readouterr().out
    assert "this configuration has no engram layers" in text and "FAILED" not in text
    assert "drafts: the set has none for ref" in text


def test_a_set_with_everything_in_batches_of_three_passes(tmp_path: Path) -> None:
    checkpoint, golden = make_set(tmp_path, WITH_ALL, 3, (2, 19), layers_of=19)
    report = verify(checkpoint, golden, progress=False)
    assert report.ok
    assert [mode.mode for mode in report.modes] == ["f32", "f32_noq", "ref"]
    assert [prompt.rows for prompt in report.modes[0].prompts] == [15, 15]
    kinds = {kind.kind for kind in report.modes[0].layers[0].kinds}
    assert {"engram_out", "candidates", "compress_kv", "topk_idxs_with_offset", "compressor_latent_pre_rope"} <= kinds
    assert all(entry.ok for mode in report.modes for entry in mode.hashes)


def test_window_kv_is_watched_where_a_fused_operation_makes_it(made: tuple[Path, Path]) -> None:
    """The layer check compares what the operation made; the trace has it made one by one and sees it before its QDQ."""
    checkpoint, golden = made
    plain = load_model(checkpoint, "fp32", kernels="torch", progress=False)

    def fused(*args: Any) -> Projected:
        return query_projection(*(plain.numerics if isinstance(arg, Arithmetic) else arg for arg in args))

    register(dataclasses.replace(TORCH, name="fused projection", query_projection=fused))
    model = load_model(checkpoint, "fp32", kernels="fused projection", progress=False)
    (layers,) = check_layer_files(model, GoldenSet(golden), "f32")
    assert layers.ok and "window_ring" in {kind.kind for kind in layers.kinds}
    near = []
    for one in (plain, model):
        with QdqTrace(one) as trace:
            teacher_forced(one, GoldenSet(golden).prompts("f32", one.config)[-1])
        near.append(trace.near)
    assert near[0] == near[1] and any(flip.kind == "window KV" for flip in near[0])


def test_json_is_the_report(made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*made, "--mode", "ref", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    (mode,) = content["modes"]
    assert mode["mode"] == "ref" and mode["ok"] and [prompt["rows"] for prompt in mode["prompts"]] == [10, 10, 10]
    assert {"kind", "elements", "equal", "rule", "error_max", "ok", "note"} == set(mode["layers"][0]["kinds"][0])


def test_files_and_keys_that_are_not_there_are_said_or_left_out(own: tuple[Path, Path]) -> None:
    checkpoint, golden = own
    (golden / "golden_f32_noq.safetensors").unlink()
    (golden / "layers_p26_ref.safetensors").unlink()
    (golden / "golden.json").write_text("{}", encoding="utf-8")
    for key in ("prefill.layers.1.compress_kv", "prefill.layers.0.x_out", "decode0.layers.2.topk_idxs_with_offset"):
        change(golden / "layers_p26_f32.safetensors", key, lambda tensor: None)
    report = verify(checkpoint, golden, progress=False)
    assert report.ok
    assert [mode.mode for mode in report.modes] == ["f32", "ref"]
    assert "layers: the set has no layer file for ref" in report.modes[1].left_out
    assert all(prompt.counted == 0 and "no id judged" in prompt.note for prompt in report.modes[1].prompts)


def test_a_recorded_tie_leaves_rows_out(own: tuple[Path, Path]) -> None:
    checkpoint, golden = own
    facts = json.loads((golden / "golden.json").read_text(encoding="utf-8"))
    facts["noq_ties"] = {"7": {"layer": 1, "position": 8, "rows_from": 2}}
    (golden / "golden.json").write_text(json.dumps(facts), encoding="utf-8")
    change(golden / "golden_f32_noq.safetensors", "p7.logits", lambda logits: torch.cat([logits[:, :2], 2 * logits[:, 2:]], 1))
    assert verify(checkpoint, golden, "f32_noq", progress=False).ok
    change(golden / "golden_f32_noq.safetensors", "p7.logits", lambda logits: 2 * logits)
    assert not verify(checkpoint, golden, "f32_noq", progress=False).ok


def nudged(logits: Tensor, relative: float) -> Tensor:
    """One row of the second sequence, moved where it is largest."""
    row = logits[1, 3]
    row[row.abs().argmax()] *= 1 + relative
    return logits


@pytest.mark.parametrize(("mode", "relative"), [("f32", 3e-5), ("f32_noq", 3e-5), ("f32", 0.1)])
def test_one_row_outside_the_tolerance_fails(own: tuple[Path, Path], mode: str, relative: float) -> None:
    change(own[1] / f"golden_{mode}.safetensors", "p7.logits", lambda logits: nudged(logits, relative))
    assert run(*own, "--mode", mode) == 1
    change(own[1] / f"golden_{mode}.safetensors", "p7.logits", lambda logits: nudged(logits, -relative / (1 + relative)))
    assert run(*own, "--mode", mode) == 0


@pytest.mark.parametrize("mode", ["f32", "f32_noq", "ref"])
def test_one_other_id_fails(own: tuple[Path, Path], mode: str) -> None:
    """The last id is fed to no step, so that the logits stay what they were."""

    def other(ids: Tensor) -> Tensor:
        ids[0, -1] = (ids[0, -1] + 1) % SMALL["vocab_size"]
        return ids

    change(own[1] / f"golden_{mode}.safetensors", "p26.generated", other)
    assert run(*own, "--mode", mode) == 1


def test_nan_logits_fail(own: tuple[Path, Path]) -> None:
    checkpoint, golden = own
    model = load_model(checkpoint, "release", progress=False)
    model.norm.weight.fill_(torch.nan)
    for mode in ("ref",):
        assert not any(prompt.ok for prompt in check_mode(model, GoldenSet(golden), mode).prompts)


KINDS = [
    "attn_out", "ffn_out", "x_out", "pre_out", "gate_indices", "gate_weights", "compress_kv", "index_k", "window_ring",
    "topk_idxs_with_offset", "compressor_latent_pre_rope", "main_hidden",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["f32", "ref"])
def test_a_kind_that_differs_fails(own: tuple[Path, Path], mode: str, kind: str) -> None:
    """One layer's prefill tensor, moved by one position."""
    file = own[1] / f"layers_p26_{mode}.safetensors"
    key = next(key for key in sorted(load_file(file)) if key.startswith("prefill.") and key.endswith("." + kind))
    change(file, key, lambda tensor: tensor.roll(1, 0 if kind.startswith("gate_") else 1))
    report = verify(*own, mode, progress=False)
    assert not report.ok and all(prompt.ok for prompt in report.modes[0].prompts)
    assert kind in {entry.kind for entry in report.modes[0].layers[0].kinds if not entry.ok}


def test_kinds_that_are_not_known_are_said(own: tuple[Path, Path]) -> None:
    file = own[1] / "layers_p26_ref.safetensors"
    save_file(load_file(file) | {"prefill.layers.0.q_out": torch.zeros(3)}, file)
    report = verify(*own, "ref", progress=False)
    assert report.ok and report.modes[0].layers[0].unknown == ["q_out"]


def test_a_known_kind_that_no_module_gives_fails(own: tuple[Path, Path]) -> None:
    file = own[1] / "layers_p26_ref.safetensors"
    save_file(load_file(file) | {"prefill.layers.0.engram_out": torch.zeros(1, 26, 2, 64)}, file)
    report = verify(*own, "ref", progress=False)
    assert not report.ok and report.modes[0].layers[0].unused == ["prefill.layers.0.engram_out"]


def test_a_qdq_flip_is_shown_and_accepted(own: tuple[Path, Path]) -> None:
    """The golden as an implementation would give it whose value fell on the other side of a rounding boundary."""
    checkpoint, golden = own
    model = load_model(checkpoint, "fp32", progress=False)
    prompts = {prompt.length: prompt for prompt in GoldenSet(golden).prompts("f32", model.config)}
    spoiled = []
    for length, prompt in prompts.items():
        with QdqTrace(model) as trace:
            teacher_forced(model, prompt)
            for flip in sorted(trace.near):
                trace.forced = {flip}
                logits = teacher_forced(model, prompt).logits
                worst = ((logits - prompt.logits).abs().amax(-1) / prompt.logits.abs().amax(-1)).max()
                if 1e-4 < worst < 1e-2:
                    spoiled.append((length, flip, logits))
                    break
    assert spoiled, "no prompt of this set has a visible flip: choose another seed"
    for length, _, logits in spoiled:
        change(golden / "golden_f32.safetensors", f"p{length}.logits", lambda old, new=logits: new)
    report = verify(checkpoint, golden, "f32", progress=False)
    notes = {prompt.prompt: prompt.note for prompt in report.modes[0].prompts}
    for length, flip, _ in spoiled:
        assert f"{flip.block} {flip.kind} at position {flip.position}" in notes[f"p{length}"]
    assert all(prompt.ok for prompt in report.modes[0].prompts)
    length = spoiled[0][0]
    change(golden / "golden_f32.safetensors", f"p{length}.logits", lambda logits: nudged(logits, 1e-3))
    failed = [prompt.prompt for prompt in verify(checkpoint, golden, "f32", progress=False).modes[0].prompts if not prompt.ok]
    assert failed == [f"p{length}"]


def test_a_qdq_flip_inside_a_layer_file_is_shown_and_accepted(own: tuple[Path, Path]) -> None:
    """A window value of an early position, which the golden's ring does not hold, shows in the rows that attend to it."""
    checkpoint, golden = own
    model = load_model(checkpoint, "fp32", progress=False)
    prompt = GoldenSet(golden).prompts("f32", model.config)[-1]
    file = golden / "layers_p26_f32.safetensors"
    sound = load_file(file)
    with QdqTrace(model) as trace:
        teacher_forced(model, prompt, 1)
        early = [flip for flip in sorted(trace.near) if flip.kind == "window KV" and flip.batch == 0 and flip.position < 10]
        for flip in early:
            trace.forced = {flip}
            flipped = layer_tensors(model, prompt)
            key = f"prefill.{flip.block}.attn_out"
            if not within(flipped[key], sound[key], 1e-5).all():
                break
        else:
            pytest.fail("no flip of this set shows: choose another seed")
    save_file(flipped, file)
    (layers,) = verify(checkpoint, golden, "f32", progress=False).modes[0].layers
    assert layers.ok and f"{flip.block} window KV at position {flip.position}" in layers.note


def test_a_tie_is_an_exchange_of_equal_scores() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0, 2.0]]).expand(4, -1).clone()
    scores[3, 3] = -torch.inf
    ours = torch.tensor([[1, 1, 0, 0, 1]] * 4, dtype=torch.bool)
    theirs = torch.tensor([[1, 0, 0, 1, 1], [0, 1, 1, 0, 1], [1, 1, 0, 0, 1], [1, 0, 0, 1, 1]], dtype=torch.bool)
    assert tied_rows(ours, theirs, scores).tolist() == [True, False, False, False]


FACTS, TENSORS, LAYERS = "golden.json", "golden_f32.safetensors", "layers_p26_f32.safetensors"


def write(name: str, text: str) -> Callable[[Path], Any]:
    """Replaces a file of the set."""
    return lambda golden: (golden / name).write_text(text, encoding="utf-8")


def remove(pattern: str) -> Callable[[Path], Any]:
    """Deletes files of the set."""
    return lambda golden: [file.unlink() for file in golden.glob(pattern)]


def alter(key: str, edit: Callable[[Tensor], Tensor | None]) -> Callable[[Path], Any]:
    """Changes one tensor of mode f32."""
    return lambda golden: change(golden / TENSORS, key, edit)


def store(name: str, key: str, *shape: int) -> Callable[[Path], Any]:
    """Replaces a tensor file by one with a single tensor."""
    return lambda golden: save_file({key: torch.zeros(shape)}, golden / name)


ERRORS: list[tuple[str, Callable[[Path], Any], str, str]] = [
    ("no folder", shutil.rmtree, "f32", "golden.json: cannot be read"),
    ("no facts", remove(FACTS), "f32", "golden.json: cannot be read"),
    ("broken facts", write(FACTS, "{"), "f32", "golden.json: is not valid JSON"),
    ("facts of another kind", write(FACTS, "[]"), "f32", "expected a JSON object"),
    ("no mode", remove("golden_*"), "f32", "holds none of golden_f32"),
    ("a mode without file", remove("golden_f32_noq*"), "f32_noq", "no such file; this set has f32, ref"),
    ("broken tensors", write(TENSORS, "12345678901"), "f32", "no readable safetensors file"),
    ("no prompts", store(TENSORS, "x", 1), "f32", "holds no p<L>.input_ids"),
    ("no logits", alter("p7.logits", lambda logits: None), "f32", "p7.logits is missing"),
    ("another vocabulary", alter("p7.logits", lambda logits: logits[..., :100]), "f32", "p7.logits has shape"),
    ("another length", alter("p7.input_ids", lambda ids: ids[:, :3]), "f32", "p7.input_ids has shape"),
    ("an id too large", alter("p7.input_ids", lambda ids: ids + 320), "f32", "vocab_size"),
    ("layers of no prompt", store("layers_p9_f32.safetensors", "prefill.layers.0.x_out", 1), "f32", "has no prompt p9"),
    ("too many layers", store(LAYERS, "prefill.layers.7.x_out", 1, 26, 2, 64), "f32", "has layer 7"),
    ("other streams", store(LAYERS, "prefill.layers.0.x_out", 1, 26, 4, 64), "f32", "has streams"),
    ("layers of another width", store(LAYERS, "prefill.layers.0.attn_out", 1, 26, 32), "f32", "attn_out has shape"),
    ("no layers", store(LAYERS, "x", 1), "f32", "no per-layer tensors"),
    ("a tie without a row", write(FACTS, '{"noq_ties": {"7": {"layer": 1}}}'), "f32_noq", "an integer rows_from"),
    ("other margins", write(FACTS, '{"prompts": {"7": {"ref_margin": [[1.0]]}}}'), "ref", "prompts.7.ref_margin has shape"),
]


@pytest.mark.parametrize(("edit", "mode", "words"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_what_cannot_be_read_is_named(
    own: tuple[Path, Path], capsys: pytest.CaptureFixture[str], edit: Callable[[Path], Any], mode: str, words: str
) -> None:
    edit(own[1])
    assert run(*own, "--mode", mode) == 2
    captured = capsys.readouterr()
    assert words in captured.err and str(own[1]) in captured.err
    assert captured.err.count("\n") == 1


def test_another_checkpoint_is_refused(made: tuple[Path, Path], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, made[1]) == 2
    assert "give the checkpoint that this set was made from" in capsys.readouterr().err
    assert run(folder.parent, made[1]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_mode_that_does_not_exist_is_refused(made: tuple[Path, Path]) -> None:
    with pytest.raises(GoldenError, match="expected one of f32, f32_noq, ref"):
        GoldenSet(made[1]).select_modes("bf16")
