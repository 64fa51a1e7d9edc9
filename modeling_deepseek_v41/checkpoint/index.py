# SPDX-License-Identifier: Apache-2.0
"""Which file of a checkpoint folder holds which tensor, and whether index, files and headers agree."""

from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..errors import CheckpointError
from .shard import StoredTensor, load_json, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def some(items: Collection[str], shown: int = 3) -> str:
    """The first few of ``items`` and how many more there are, for a message."""
    listed = ", ".join(list(items)[:shown])
    return listed if len(items) <= shown else f"{listed} and {len(items) - shown} more"


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``folder``, by name; reads the index and the headers, no data.

    With ``model.safetensors.index.json`` the index names the files; without it the folder must hold one
    ``model.safetensors``. Raises CheckpointError for an index that is broken or names files outside the folder, for
    missing, truncated or broken files, and for tensors that stand only in the index or only in a file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder; give the folder that holds the checkpoint's config.json")
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).is_file():
            ranks = next(folder.glob("weights/tp*_sharded_checkpoint.safetensors"), None)
            instead = (
                "it holds rank files, which only generate, score and NxD Inference read, with their manifest.json; "
                if ranks
                else ""
            )
            raise CheckpointError(
                f"{folder}: holds neither {INDEX} nor {SINGLE}; {instead}give the folder of the checkpoint itself"
            )
        return read_header(folder / SINGLE)
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(files)} files that it names are missing: {some(missing)};"
            " download them into this folder"
        )
    found = {file: read_header(folder / file) for file in files}
    listed: dict[str, list[str]] = {file: [] for file in files}
    for name, file in weight_map.items():
        listed[file].append(name)
    for file in files:
        _check_file(index, file, found[file], listed[file])
    return {name: found[file][name] for name, file in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map: Any = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected an object of tensor names and files, found {weight_map!r:.80}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(f"{index}: weight_map: tensor {name!r}: expected a file name, found {file!r}")
        outside = PurePosixPath(file).is_absolute() or PureWindowsPath(file).anchor or "\\" in file or "\0" in file
        if outside or ".." in PurePosixPath(file).parts:
            raise CheckpointError(
                f"{index}: tensor {name!r} points outside the checkpoint folder: {file!r}; expected the name of a file in it"
            )
    return weight_map


def _check_file(index: Path, file: str, found: dict[str, StoredTensor], listed: Sequence[str]) -> None:
    absent = [name for name in listed if name not in found]
    if absent:
        raise CheckpointError(
            f"{index.parent / file}: {len(absent)} tensors that {INDEX} places in this file are not in it: {some(absent)};"
            " index and files belong to different checkpoints, download them again"
        )
    extra = sorted(found.keys() - set(listed))
    if extra:
        raise CheckpointError(
            f"{index.parent / file}: {len(extra)} tensors of this file are not placed in it by {INDEX}: {some(extra)};"
            " index and files belong to different checkpoints, download them again"
        )
