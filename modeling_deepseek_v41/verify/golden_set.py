# SPDX-License-Identifier: Apache-2.0
"""Reading a golden set: the outputs of the release's reference on one checkpoint, for any configuration.

A set is a folder with golden.json, golden_<mode>.safetensors and layers_p<L>_<mode>.safetensors. Modes, lengths, batch
sizes and most keys are optional; what is there must fit together and fit the checkpoint.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..config import ModelConfig
from .golden_drafts import GoldenDrafts, read_drafts
from .golden_error import GoldenError, check_shape, check_vocabulary

MODES = {"f32": "fp32", "f32_noq": "fp32_no_qdq", "ref": "release"}
"""The modes of a set, and the model's numerics that each pins."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt p<L> of a mode: N - 1 decode steps follow the prefill, each fed with the golden's own id."""

    length: int
    input_ids: Tensor
    """[B, L] int64."""
    generated: Tensor
    """[B, N] int64: greedy ids, the first from the prefill."""
    logits: Tensor
    """[B, N, vocab] fp32: of the prefill's last position, then of every step."""
    hashes: Tensor | None
    """[B, L + N - 1, engram layers, columns] int64 table rows."""
    margin: Tensor | None
    """[B, N] distance of the best logit from the second, where the set records it."""
    noise: Tensor | None
    """[B, N] relative noise of the reference's own logits."""
    tie_from: int | None
    """First row that a tie without a rule may have changed."""
    drafts: GoldenDrafts | None = None
    taps: Tensor | None = None
    """[B, L + N - 1, targets * d] the reference's own taps (main_hidden), read for the drafts of ref alone."""

    @property
    def name(self) -> str:
        """p<L>, as in the files."""
        return f"p{self.length}"


@dataclasses.dataclass(frozen=True)
class ImagePrompt:
    """The image prompt vl: only its engram hashes can be checked without a vision tower."""

    ids: Tensor
    """[B, T] int64: the prompt and the ids generated after it, but the last."""
    alive: Tensor
    """[B, T] bool, False inside image spans."""
    hashes: Tensor


def is_drafters(key: str) -> bool:
    """Whether ``key`` of a layer file belongs to the drafter: draft<n>.* or *.mtp.<i>.*."""
    return key.startswith("draft") or ".mtp." in key


class GoldenSet:
    """The golden set in ``folder``, with ``golden.json`` read and the modes known; tensors are read when asked for."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.facts = self._read_json(self.folder / "golden.json")
        self.modes = [mode for mode in MODES if self._file(mode).exists()]
        if not self.modes:
            names = ", ".join(f"golden_{mode}.safetensors" for mode in MODES)
            raise GoldenError(f"{self.folder}: holds none of {names}; give the folder of a golden set")

    def select_modes(self, mode: str | None) -> list[str]:
        """``mode`` alone where it is given, else every mode that the set has; raises GoldenError where it has none such."""
        if mode is None:
            return self.modes
        if mode not in MODES:
            raise GoldenError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
        if mode not in self.modes:
            raise GoldenError(f"{self._file(mode)}: no such file; this set has {', '.join(self.modes)}")
        return [mode]

    def prompts(self, mode: str, config: ModelConfig) -> list[Prompt]:
        """The prompts of ``mode``, shortest first, checked against ``config``."""
        file = self._file(mode)
        tensors = self.tensors(file)
        lengths = sorted(int(match[1]) for key in tensors if (match := re.fullmatch(r"p(\d+)\.input_ids", key)))
        if not lengths:
            raise GoldenError(f"{file}: holds no p<L>.input_ids; give the folder of a golden set")
        return [self._prompt(file, tensors, mode, length, config) for length in lengths]

    def missing_prompts(self, mode: str) -> list[str]:
        """Prompts that golden.json lists, or that the file of ``mode`` holds parts of, without their ids there."""
        keys = self.tensors(self._file(mode)).keys()
        listed = self.facts.get("prompt_lengths") or []
        names = {f"p{length}" for length in listed} if isinstance(listed, list) else set()
        names |= {match[1] for key in keys if (match := re.match(r"(p\d+)\.", key))}
        return sorted(name for name in names if f"{name}.input_ids" not in keys)

    def image_prompt(self, mode: str, config: ModelConfig) -> ImagePrompt | None:
        """The image prompt's ids and hashes, or None where the set has none."""
        file = self._file(mode)
        tensors = self.tensors(file)
        keys = ("vl.input_ids", "vl.token_types", "vl.generated", "vl.engram_hash")
        if not config.engram_layer_ids or any(key not in tensors for key in keys):
            return None
        ids, types, generated, hashes = (tensors[key] for key in keys)
        after = generated[:, :-1]
        alive = torch.cat([types < 0, torch.ones_like(after, dtype=torch.bool)], 1)
        image = ImagePrompt(torch.cat([ids, after], 1), alive, hashes)
        check_shape(file, "vl.engram_hash", hashes, (*image.ids.shape, len(config.engram_layer_ids), config.engram_columns))
        check_vocabulary(file, "vl.input_ids", image.ids, config)
        return image

    def layer_files(self, mode: str) -> dict[int, Path]:
        """Prompt length to the file of per-layer tensors of ``mode``; often one, or none."""
        pattern = re.compile(rf"layers_p(\d+)_{mode}\.safetensors")
        found = {int(match[1]): path for path in self.folder.iterdir() if (match := pattern.fullmatch(path.name))}
        return dict(sorted(found.items()))

    def has_drafts(self, mode: str) -> bool:
        """Whether the set pins what the drafter makes, in the file of ``mode`` or in a layer file."""
        files = [self._file(mode), *self.layer_files(mode).values()]
        return any(".draft_" in key or is_drafters(key) for file in files for key in self.tensors(file))

    def has_taps(self, mode: str) -> bool:
        """Whether the set has the taps of whole prompts."""
        return any(key.endswith(".main_hidden") for key in self.tensors(self._file(mode)))

    def has_image_logits(self, mode: str) -> bool:
        """Whether the set pins logits of the image prompt."""
        return "vl.logits" in self.tensors(self._file(mode))

    def tensors(self, file: Path) -> dict[str, Tensor]:
        """Every tensor of ``file``; raises GoldenError where it cannot be read."""
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise GoldenError(f"{file}: is no readable safetensors file ({error}); copy the golden set again") from None

    def _file(self, mode: str) -> Path:
        return self.folder / f"golden_{mode}.safetensors"

    @staticmethod
    def _read_json(file: Path) -> Mapping[str, Any]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise GoldenError(f"{file}: cannot be read ({error.strerror}); give the folder of a golden set") from None
        except ValueError as error:
            raise GoldenError(f"{file}: is not valid JSON ({error}); copy the golden set again") from None
        if not isinstance(content, dict):
            raise GoldenError(f"{file}: expected a JSON object at the top level, found {type(content).__name__}")
        return content

    def _prompt(self, file: Path, tensors: dict[str, Tensor], mode: str, length: int, config: ModelConfig) -> Prompt:
        name = f"p{length}"
        for key in ("generated", "logits"):
            if f"{name}.{key}" not in tensors:
                raise GoldenError(f"{file}: {name}.{key} is missing; copy the golden set again")
        ids, generated, logits = (tensors[f"{name}.{key}"] for key in ("input_ids", "generated", "logits"))
        batch, steps = generated.shape
        check_shape(file, f"{name}.input_ids", ids, (batch, length))
        check_shape(file, f"{name}.logits", logits, (batch, steps, config.vocab_size))
        for key, tokens in (("input_ids", ids), ("generated", generated)):
            check_vocabulary(file, f"{name}.{key}", tokens, config)
        positions = length + steps - 1
        if positions > config.max_position_embeddings:
            raise GoldenError(
                f"{file}: {name} reaches position {positions}, max_position_embeddings of {config.source} is"
                f" {config.max_position_embeddings}; give the checkpoint that this set was made from"
            )
        hashes = tensors.get(f"{name}.engram_hash")
        if hashes is not None and hashes.numel() == 0:
            hashes = None
        if hashes is not None:
            shape = (batch, positions, len(config.engram_layer_ids), config.engram_columns)
            check_shape(file, f"{name}.engram_hash", hashes, shape)
        margin, noise = (self._per_row(length, f"{mode}_{kind}", (batch, steps)) for kind in ("margin", "noise_rel"))
        agree = self._per_row(length, "draft_noise_ids_agree", (batch, steps)) if mode == "ref" else None
        tie = self._first_tied_row(length) if mode == "f32_noq" else None
        drafts = read_drafts(file, tensors, self.facts, generated, length, config, agree)
        taps = tensors.get(f"{name}.main_hidden") if drafts is not None and mode == "ref" else None
        if taps is not None:
            width = len(config.dspark_target_layer_ids) * config.hidden_size
            check_shape(file, f"{name}.main_hidden", taps, (batch, positions, width))
        return Prompt(length, ids, generated, logits.float(), hashes, margin, noise, tie, drafts, taps)

    def _per_row(self, length: int, kind: str, shape: tuple[int, int]) -> Tensor | None:
        facts = (self.facts.get("prompts") or {}).get(str(length)) or {}
        values = facts.get(kind)
        if values is None:
            return None
        table = torch.tensor(values, dtype=torch.float32)
        check_shape(self.folder / "golden.json", f"prompts.{length}.{kind}", table, shape)
        return table

    def _first_tied_row(self, length: int) -> int | None:
        entry = (self.facts.get("noq_ties") or {}).get(str(length))
        ties = entry if isinstance(entry, list) else [entry] if entry else []
        rows = [tie["rows_from"] for tie in ties if isinstance(tie, dict) and type(tie.get("rows_from")) is int]
        if len(rows) < len(ties):
            where = f"{self.folder / 'golden.json'}: noq_ties.{length}"
            raise GoldenError(f"{where}: expected an integer rows_from, found {entry!r}")
        return min(rows, default=None)
