# SPDX-License-Identifier: Apache-2.0
"""A checkpoint against a golden set, mode after mode."""

from pathlib import Path

from ..config import ModelConfig, load_config
from ..loading import load_model
from ..model import DeepseekV41Model
from .golden_set import MODES, GoldenError, GoldenSet, Prompt
from .hashes import check_hashes, check_image_hashes
from .layers import check_layers
from .logits import check_logits
from .report import HashResult, LayersResult, ModeResult, PromptResult, Report
from .run import teacher_forced


def verify(
    model_path: str | Path, golden_folder: str | Path, mode: str | None = None, kernels: str = "torch", progress: bool = True
) -> Report:
    """Loads ``model_path`` in the numerics of ``mode`` (default: of every mode that the set has) and checks it.

    ``kernels``: the implementation to check (kernels/dispatch.py). Raises GoldenError, ConfigError, CheckpointError or
    RequestError where a folder cannot be read or the two do not belong together; a model outside the tolerances is no
    error: see ``Report.ok``.
    """
    golden = GoldenSet(golden_folder)
    modes = golden.select_modes(mode)
    config = load_config(model_path)
    results = []
    for name in modes:
        longest = _longest(golden.prompts(name, config))
        model = load_model(model_path, MODES[name], max_seq_len=longest, kernels=kernels, progress=progress)
        results.append(check_mode(model, golden, name))
    return Report(str(model_path), str(golden_folder), results)


def check_mode(model: DeepseekV41Model, golden: GoldenSet, mode: str) -> ModeResult:
    """Checks ``model``, whose numerics are MODES[mode], against everything that ``golden`` holds for ``mode``."""
    prompts = golden.prompts(mode, model.config)
    checked: list[PromptResult] = []
    hashes: list[HashResult] = []
    for prompt in prompts:
        run = teacher_forced(model, prompt)
        checked.append(check_logits(model, prompt, mode, run.logits))
        if run.hashes is not None and prompt.hashes is not None:
            hashes.append(check_hashes(prompt.name, run.hashes, prompt.hashes))
    image = golden.image_prompt(mode, model.config)
    if image is not None:
        hashes.append(check_image_hashes(model, image))
    layers = check_layer_files(model, golden, mode)
    return ModeResult(mode, MODES[mode], checked, layers, hashes, _left_out(golden, mode, model.config, layers, hashes))


def check_layer_files(model: DeepseekV41Model, golden: GoldenSet, mode: str) -> list[LayersResult]:
    """The layer files of ``mode``; empty where the set has none."""
    prompts = {prompt.length: prompt for prompt in golden.prompts(mode, model.config)}
    results = []
    for length, file in golden.layer_files(mode).items():
        if length not in prompts:
            raise GoldenError(f"{file}: the set has no prompt p{length} in mode {mode}; copy the golden set again")
        results.append(check_layers(model, prompts[length], mode, file, golden.tensors(file)))
    return results


def _longest(prompts: list[Prompt]) -> int:
    return max(prompt.length + prompt.generated.shape[1] - 1 for prompt in prompts)


def _left_out(
    golden: GoldenSet, mode: str, config: ModelConfig, layers: list[LayersResult], hashes: list[HashResult]
) -> list[str]:
    words = []
    missing = golden.missing_prompts(mode)
    if missing:
        words.append(f"prompts {', '.join(missing)}: the set names them, the file of {mode} lacks their ids; copy it again")
    unhashed = [f"p{prompt.length}" for prompt in golden.prompts(mode, config) if prompt.hashes is None]
    if config.engram_layer_ids and hashes and unhashed:
        words.append(f"engram hashes of {', '.join(unhashed)}: the set has none")
    if golden.has_drafts(mode):
        words.append("drafts: not checked, this command does not run the drafter")
    if golden.has_taps(mode):
        words.append("main_hidden of whole prompts: not judged, it carries the mode's noise; a layer file's is compared")
    if golden.has_image_logits(mode):
        words.append("vl logits: not checked, image input is not part of this version (its engram hashes are)")
    if not config.engram_layer_ids:
        words.append("engram hashes: this configuration has no engram layers")
    elif not hashes:
        words.append(f"engram hashes: the set has none for {mode}")
    if not layers:
        words.append(f"layers: the set has no layer file for {mode}")
    return words
