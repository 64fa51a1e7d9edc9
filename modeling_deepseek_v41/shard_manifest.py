# SPDX-License-Identifier: Apache-2.0
"""The manifest of a folder of rank files: what they are made for, and the size and hash of each.

It grows as ``manifest.json.part`` while files are written, gets its name when all are there, and so tells a finished folder
from one that is not.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .checkpoint.rank_file import PART, sha256
from .checkpoint.shard import load_json
from .config import ModelConfig
from .errors import CheckpointError
from .expert_bank import ExpertStorage
from .layout import Layout
from .numerics import Numerics

WEIGHTS, MANIFEST = "weights", "manifest.json"

_ADVICE = "give the options that the files were made with, or make them again in an empty folder"
_AGAIN = "give the command that made it once more, which keeps the files that are whole"


@dataclasses.dataclass(frozen=True)
class RankFile:
    """A finished file: its bytes, their hash, and how many expert rows in it are exceptions of fp8_exact."""

    bytes: int
    sha256: str
    exception_rows: int


@dataclasses.dataclass
class Manifest:
    """``made_for``: what the files depend on, by name (``made_for``). ``files``: the finished ones, by file name."""

    made_for: dict[str, Any]
    files: dict[str, RankFile] = dataclasses.field(default_factory=dict)

    def check(self, where: Path, made_for: Mapping[str, Any]) -> None:
        """Raises CheckpointError naming the first of ``made_for`` that is not what the files in ``where`` are made for."""
        for name, wanted in made_for.items():
            found = self.made_for.get(name)
            if found != wanted:
                raise CheckpointError(f"{where}: {name}: its rank files are made for {found}, expected {wanted}; {_ADVICE}")

    def write(self, file: Path) -> None:
        """Writes it to ``file``, which holds the old content or the new one, whenever this is interrupted."""
        new = file.with_name(file.name + ".new")
        new.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        new.replace(file)


def made_for(
    config: ModelConfig, layout: Layout, numerics: Numerics, experts: ExpertStorage, prefix: str = ""
) -> dict[str, Any]:
    """Everything that the content of rank files depends on but the checkpoint's values, as JSON has it."""
    numbers = {key: value for key, value in dataclasses.asdict(config).items() if key not in ("source", "unknown_keys")}
    facts = {
        "configuration": hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest(),
        **dataclasses.asdict(layout),
        "dtype": str(numerics.dtype).removeprefix("torch."),
        "expert_weight_format": experts.format,
        "expert_exception_rows": experts.exception_rows,
        "prefix": prefix,
    }
    return json.loads(json.dumps(facts))


def is_sharded(folder: str | Path) -> bool:
    """Whether ``folder`` holds rank files rather than a checkpoint; raises CheckpointError where they are not finished."""
    weights = Path(folder) / WEIGHTS
    if (weights / MANIFEST).exists():
        return True
    if (weights / (MANIFEST + PART)).exists():
        raise CheckpointError(f"{weights}: its rank files are not finished; give the command that makes them once more")
    return False


def read_manifest(file: Path) -> Manifest:
    """Reads a manifest, finished or not; raises CheckpointError where it is none."""
    content = load_json(file)
    made, files = content.get("made_for"), content.get("files")
    try:
        if not isinstance(made, dict) or not isinstance(files, dict):
            raise TypeError
        records = {name: RankFile(**entry) for name, entry in files.items()}
        if any([type(value) for value in vars(record).values()] != [int, str, int] for record in records.values()):
            raise TypeError
        return Manifest(made, records)
    except TypeError:
        raise CheckpointError(f"{file}: is no manifest of rank files; make them again in an empty folder") from None


def rank_file_name(rank: int | str) -> str:
    """The name that NxD Inference gives the weights of ``rank``, a number, or "*" for a pattern."""
    return f"tp{rank}_sharded_checkpoint.safetensors"


def check_file(file: Path, record: RankFile | None, done: Callable[[int], None] = lambda count: None) -> None:
    expected = check_size(file, record)
    found = sha256(file, done)
    if found != expected:
        raise CheckpointError(f"{file}: its bytes have changed: sha256 {found}, expected {expected}; {_AGAIN}")


def check_size(file: Path, record: RankFile | None) -> str:
    """Raises CheckpointError where ``file`` is missing or not as long as ``record`` says; returns the hash it should have."""
    if record is None or not file.is_file():
        raise CheckpointError(f"{file}: is missing; {_AGAIN}")
    size = file.stat().st_size
    if size != record.bytes:
        raise CheckpointError(f"{file}: has {size} bytes, expected {record.bytes}; {_AGAIN}")
    return record.sha256
