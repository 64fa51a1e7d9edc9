# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to a folder of rank files, each the weights of one rank as its own modules hold them.

Linears are kept in bf16, which holds what is stored exactly; who computes in fp32 widens them while loading.
The folder loads without the checkpoint: weights/tp{rank}_sharded_checkpoint.safetensors, the names and places of NxD
Inference, weights/manifest.json, and copies of the checkpoint's configuration and tokenizer files.
"""

import functools
import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint.index import INDEX
from .checkpoint.rank import RankCheckpoint, Source
from .checkpoint.rank_file import PART, file_size, new_file, sha256
from .checkpoint.reader import Checkpoint
from .config import load_config
from .errors import CheckpointError
from .expert_bank import ExpertStorage, exceptions_of
from .layout import Layout
from .loading import build_model, load_weights
from .numerics import numerics_by_name
from .parallel import unconnected
from .progress import Progress, format_bytes
from .shard_manifest import MANIFEST, WEIGHTS, Manifest, RankFile, check_file, made_for, rank_file_name, read_manifest
from .shard_plan import ShardPlan

_ENDS = 1 << 20
"""Bytes at the beginning and the end of every file by which checkpoints are told apart."""

_COPIED = ("*.json", "*.jinja")


def shard_checkpoint(
    folder: str | Path,
    out: str | Path,
    layout: Layout,
    numerics: str = "release",
    expert_weight_format: str = "bf16",
    expert_exception_rows: int | None = None,
    progress: bool = True,
    prefix: str = "",
    extra: Callable[[int], Mapping[str, Tensor]] = lambda rank: {},
    drafter: bool = True,
    ranks: Iterable[int] | None = None,
) -> Manifest:
    """Writes the rank files of ``layout`` for the checkpoint in ``folder`` to ``out``, with the drafter where it has one.

    ``numerics``, ``expert_weight_format``, ``expert_exception_rows``: as ``loading.load_model`` takes them, which must then
    get the same. ``prefix`` stands before every tensor's name, and ``extra(rank)`` are tensors that a file holds besides.
    Without ``drafter`` its weights are left out. ``ranks``: whose files are wanted, by default everybody's.
    A run that was broken off goes on where it was: files that are whole by size and hash are kept. Memory: one weight
    beyond the file cache, whatever the checkpoint's size.

    Raises RequestError for options, CheckpointError where ``out`` holds other rank files or the disk is too small, and as
    ``load_model`` does. Until the last file is written nothing in ``out`` can be loaded.
    """
    config, out = load_config(folder), Path(out)
    _check_target(Path(folder), out)
    arithmetic, experts = numerics_by_name(numerics), ExpertStorage(expert_weight_format, expert_exception_rows)
    experts.check()
    drafter = drafter and config.num_nextn_predict_layers > 0

    def empty(rank: int) -> nn.Module:
        return build_model(
            config, arithmetic, config.max_position_embeddings, expert_weight_format,
            drafter=drafter, parallel=unconnected(layout, rank), expert_exception_rows=expert_exception_rows,
            weight_dtype=torch.bfloat16,
        )  # fmt: skip

    with Checkpoint(folder, config) as checkpoint:
        made = made_for(config, layout, arithmetic, experts, prefix) | {"checkpoint": _fingerprint(checkpoint.files)}
    made |= {"drafter": drafter} | {f"tensor {name}": _digest(tensor) for name, tensor in extra(0).items()}
    weights = out / WEIGHTS
    weights.mkdir(parents=True, exist_ok=True)
    manifest = _begun(weights, made)
    files = {rank_file_name(rank): rank for rank in (range(layout.world_size) if ranks is None else ranks)}
    size = file_size({prefix + name: tensor for name, tensor in empty(0).named_parameters()} | dict(extra(0)))
    bar = Progress(size * (2 * len(files) - len(manifest.files)), "B", "sharding") if progress else None
    update = (lambda count: None) if bar is None else bar.update
    manifest.files = {name: record for name, record in manifest.files.items() if _is_whole(weights / name, record, update)}
    missing = [name for name in files if name not in manifest.files]
    _remove_others(weights, manifest)
    free = shutil.disk_usage(weights).free
    if size * len(missing) > free:
        raise CheckpointError(
            f"{weights}: {len(missing)} rank files need {format_bytes(size * len(missing))}, the disk has {format_bytes(free)};"
            " make room or give another folder"
        )
    begun, finished = weights / (MANIFEST + PART), weights / MANIFEST
    if missing:
        manifest.write(begun)
        finished.unlink(missing_ok=True)
    for name in missing:
        model, plan = empty(files[name]), ShardPlan(config, layout, files[name])
        with Checkpoint(folder, config) as checkpoint:
            write_rank(weights / name, model, RankCheckpoint(checkpoint, plan), prefix, extra(files[name]), update)
            checkpoint.finish(functools.partial(_is_unused, plan, drafter))
        manifest.files[name] = RankFile(size, sha256(weights / name, update), exceptions_of(model)[0])
        manifest.write(begun)
    for file in _copied(Path(folder)):
        shutil.copyfile(file, out / file.name)
    manifest.write(finished)
    begun.unlink(missing_ok=True)
    if bar is not None:
        bar.close()
    return manifest


def write_rank(
    file: Path, model: nn.Module, source: Source, prefix: str = "", extra: Mapping[str, Tensor] | None = None,
    done: Callable[[int], None] = lambda count: None,
) -> None:  # fmt: skip
    """Writes the weights of ``model``, on the meta device, from ``source`` to ``file``: as ``prefix`` and name, and ``extra``.

    Afterwards the model's weights are the file's, mapped into memory. ``done`` is told how many bytes were filled.
    """
    extra = extra or {}
    with new_file(file, {prefix + name: tensor for name, tensor in model.named_parameters()} | dict(extra)) as content:
        for name, tensor in extra.items():
            content[name].copy_(tensor)
        for name, module in model.named_modules():
            for key, _ in list(module.named_parameters(recurse=False)):
                memory = content[prefix + (f"{name}.{key}" if name else key)]
                setattr(module, key, nn.Parameter(memory, requires_grad=False))
        load_weights(model, source, lambda module: done(sum(own.nbytes for own in module.parameters(recurse=False))))


def _check_target(folder: Path, out: Path) -> None:
    """Raises CheckpointError where ``out`` holds something that is not a run's on ``folder``."""
    if out.resolve() == folder.resolve():
        raise CheckpointError(f"{out}: is the checkpoint's own folder; give another one for the rank files")
    others = [out / file.name for file in _copied(folder) if _differs(out / file.name, file)]
    for other in [*out.glob("*.safetensors"), *others]:
        raise CheckpointError(f"{other}: belongs to something else than {folder}; give an empty folder, or one to go on with")


def _differs(other: Path, file: Path) -> bool:
    return other.exists() and other.read_bytes() != file.read_bytes()


def _copied(folder: Path) -> list[Path]:
    """The checkpoint's files that rank files need beside them."""
    return sorted(file for pattern in _COPIED for file in folder.glob(pattern) if file.name != INDEX)


def _begun(weights: Path, made: Mapping[str, object]) -> Manifest:
    """The manifest that ``weights`` has, finished or not, or a new one; raises CheckpointError where its files are others."""
    for file in (weights / MANIFEST, weights / (MANIFEST + PART)):
        if file.exists():
            manifest = read_manifest(file)
            if not manifest.files:
                return Manifest(dict(made))
            manifest.check(file, made)
            return manifest
    strays = sorted(weights.glob(rank_file_name("*")))
    if strays:
        raise CheckpointError(f"{weights}: holds {strays[0].name}, but no {MANIFEST} that says what for; give an empty folder")
    return Manifest(dict(made))


def _is_whole(file: Path, record: RankFile, update: Callable[[int], None]) -> bool:
    try:
        check_file(file, record, update)
    except CheckpointError:
        return False
    return True


def _remove_others(weights: Path, manifest: Manifest) -> None:
    """Removes the rank files that ``manifest`` does not have: broken ones, and what a run that was broken off left."""
    for pattern in (rank_file_name("*"), rank_file_name("*") + PART):
        for file in weights.glob(pattern):
            if file.name not in manifest.files:
                file.unlink()


def _is_unused(plan: ShardPlan, drafter: bool, stored_name: str) -> bool:
    return not plan.holds(stored_name) or (not drafter and stored_name.startswith("mtp."))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _fingerprint(files: Iterable[Path]) -> str:
    """A hash of the files' names, sizes and times of change, and of what stands at their ends."""
    digest = hashlib.sha256()
    for file in files:
        size, changed = file.stat().st_size, file.stat().st_mtime_ns
        digest.update(f"{file.name} {size} {changed}\n".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_ENDS))
            handle.seek(max(0, size - _ENDS))
            digest.update(handle.read(_ENDS))
    return digest.hexdigest()
