# SPDX-License-Identifier: Apache-2.0
"""From a folder of rank files to one rank's model: strict, checked by size and hash, only bf16 widened to fp32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .checkpoint.rank_file import stored_tensors
from .checkpoint.shard import ShardReader, map_bytes
from .engram.layer import EngramTable
from .linear import fill, room
from .model import DRAFTER, DeepseekV41Model
from .progress import Progress
from .shard_manifest import MANIFEST, WEIGHTS, check_file, rank_file_name, read_manifest


def load_rank(model: DeepseekV41Model, folder: Path, made_for: Mapping[str, Any], rank: int, progress: bool) -> None:
    """Fills ``model``, on the meta device, with ``rank``'s file in ``folder``; its engram tables stay in the mapped file.

    The file may hold a drafter that the model does not have. Raises CheckpointError where the files are made for something
    else than ``made_for`` (shard_manifest.py), where this rank's is missing or changed, and where its tensors are not
    exactly the model's.
    """
    weights = folder / WEIGHTS
    manifest = read_manifest(weights / MANIFEST)
    manifest.check(weights / MANIFEST, made_for)
    file = weights / rank_file_name(rank)
    record = manifest.files.get(file.name)
    bar = Progress(2 * (record.bytes if record else 0), "B", "loading rank file") if progress else None
    update = (lambda count: None) if bar is None else bar.update
    check_file(file, record, update)
    unused = None if model.drafter is not None else DRAFTER
    stored = stored_tensors(file, dict(model.named_parameters()), unused)
    reader = ShardReader()
    for name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            place = stored[f"{name}.{key}" if name else key]
            if isinstance(module, EngramTable):
                fill(module, key, map_bytes(place, parameter.dtype))
            else:
                memory = room(module, key)
                stored_as = torch.empty(memory.shape, dtype=torch.bfloat16) if place.nbytes < memory.nbytes else memory
                reader.read(file, place.start, stored_as.view(-1).view(torch.uint8))
                memory.copy_(stored_as)
            update(place.nbytes)
    reader.close()
    if bar is not None:
        bar.close()
