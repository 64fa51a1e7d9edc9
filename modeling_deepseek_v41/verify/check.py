# SPDX-License-Identifier: Apache-2.0
"""A checkpoint against a golden set, mode after mode."""

from pathlib import Path

from ..config import ModelConfig, load_config
from ..loading import load_model
from ..model import DeepseekV41Model
from .drafts import check_drafts
from .golden_error import GoldenError
from .golden_set import MODES, GoldenSet, Prompt
from .hashes import check_hashes, check_image_hashes
from .layers import check_layers
from .logits import check_logits
from .report import DraftResult, HashResult, LayersResult, ModeResult, PromptResult, Report
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
        drafter = config.num_nextn_predict_layers > 0 and golden.has_drafts(name)
        length = _longest(golden.prompts(name, config)) + (config.dspark_block_size if drafter else 0)
        length = min(length, config.max_position_embeddings)
        model = load_model(model_path, MODES[name], length, kernels=kernels, progress=progress, drafter=drafter)
        results.append(check_mode(model, golden, name))
    return Report(str(model_path), str(golden_folder), results)


def check_mode(model: DeepseekV41Model, golden: GoldenSet, mode: str) -> ModeResult:
    """Checks ``model``, whose numerics are MODES[mode], against everything that ``golden`` holds for ``mode``.

    Drafts are checked where the model has its drafter.
    """
    prompts = golden.prompts(mode, model.config)
    checked: list[PromptResult] = []
    drafts: list[DraftResult] = []
    hashes: list[HashResult] = []
    for prompt in prompts:
        run = teacher_forced(model, prompt, drafter=model.drafter if prompt.drafts is not None else None)
        checked.append(check_logits(model, prompt, mode, run.logits))
        if run.drafts is not None and prompt.drafts is not None:
            drafts.append(check_drafts(model, prompt, mode, prompt.drafts, run.drafts))
        if run.hashes is not None and prompt.hashes is not None:
            hashes.append(check_hashes(prompt.name, run.hashes, prompt.hashes))
    image = golden.image_prompt(mode, model.config)
    if image is not None:
        hashes.append(check_image_hashes(model, image))
    layers = check_layer_files(model, golden, mode)
    words = [*_left_out(golden, mode, model.config, layers, hashes), *_drafts_left_out(golden, mode, model)]
    return ModeResult(mode, MODES[mode], checked, drafts, layers, hashes, words)


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
    if golden.has_taps(mode):
        words.append(
            "main_hidden of whole prompts: not judged, it carries the mode's noise; in ref it feeds the drafter, and a layer"
            " file's is compared"
        )
    if golden.has_image_logits(mode):
        words.append("vl logits: not checked, image input is not part of this version (its engram hashes are)")
    if not config.engram_layer_ids:
        words.append("engram hashes: this configuration has no engram layers")
    elif not hashes:
        words.append(f"engram hashes: the set has none for {mode}")
    if not layers:
        words.append(f"layers: the set has no layer file for {mode}")
    return words


def _drafts_left_out(golden: GoldenSet, mode: str, model: DeepseekV41Model) -> list[str]:
    config = model.config
    if not config.num_nextn_predict_layers:
        return [f"drafts: num_nextn_predict_layers of {config.source} is 0, the checkpoint holds no drafter"]
    missing = [prompt.name for prompt in golden.prompts(mode, config) if prompt.drafts is None]
    if not golden.has_drafts(mode):
        return [f"drafts: the set has none for {mode}"]
    if model.drafter is None:
        return ["drafts: not checked, the model was loaded without its drafter"]
    return [f"drafts of {', '.join(missing)}: the set has none"] if missing else []
