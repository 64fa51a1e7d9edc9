# SPDX-License-Identifier: Apache-2.0
"""Writing tensors in the release's format: block-scaled fp8, packed fp4, and shards with their index."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..errors import CheckpointError
from .index import INDEX
from .spec import BLOCK

FP8_MAX = 448.0
FP4_MAX = 6.0

_FP4_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Magnitudes where the e2m1 code goes up by one, and whether it does so at the tie (ties go to the even code)."""


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds ``weight`` [n, k] (fp32, finite) to e4m3fn with one power-of-two scale per block.

    Returns (values float8_e4m3fn [n, k], scale uint8 [ceil(n / block[0]), ceil(k / block[1])]); value times 2^(scale - 127)
    is the nearest to ``weight``, ties to even, with the smallest scale under which nothing saturates. The default blocks
    are those of linear weights; engram tables have block (1, 32).
    """
    rows, columns = weight.shape
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    padded = weight.new_zeros(high * block[0], wide * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(high, block[0], wide, block[1])
    exponent = _exponent(blocks.abs().amax((1, 3)), FP8_MAX)
    scaled = (blocks * _power(-exponent)[:, None, :, None]).view_as(padded)[:rows, :columns]
    values = scaled.clamp(-FP8_MAX, FP8_MAX).contiguous().to(torch.float8_e4m3fn)
    return values, (exponent + 127).to(torch.uint8)


def quantize_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds ``weight`` [n, k] (fp32, finite, k a multiple of 32) to e2m1 with one power-of-two scale per 32 columns.

    Returns (packed int8 [n, k/2], scale uint8 [n, k/32]); the low nibble of a byte is the even column. Nearest, ties to
    even, with the smallest scale under which nothing saturates.
    """
    rows, columns = weight.shape
    groups = weight.view(rows, columns // BLOCK, BLOCK)
    exponent = _exponent(groups.abs().amax(-1), FP4_MAX)
    scaled = (groups * _power(-exponent)[..., None]).view(rows, columns)
    magnitude = scaled.abs()
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    for step, at_tie in _FP4_STEPS:
        codes += (magnitude >= step) if at_tie else (magnitude > step)
    codes |= scaled.signbit().to(torch.uint8) << 3
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.view(torch.int8), (exponent + 127).to(torch.uint8)


def _exponent(largest: torch.Tensor, limit: float) -> torch.Tensor:
    mantissa, exponent = torch.frexp(largest / limit)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(largest > 0, exponent, 0).clamp(-127, 127)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(exponent.shape), exponent)


def write_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: str | Path, shard_bytes: int = 1 << 30) -> dict[str, str]:
    """Writes ``tensors`` to ``model-0000X-of-0000N.safetensors`` files in ``folder``, with their index.

    One shard at a time is held in memory: at most ``shard_bytes``, or one tensor where that is larger. uint8 tensors are
    stored as F8_E8M0 where their name ends in ".scale" and as I8 (packed fp4) elsewhere, which is how the reader hands them
    out. Returns the index's weight map. Raises CheckpointError where ``folder`` already holds weights, or where a name
    comes twice.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in folder.glob("*.safetensors*"))
    if present:
        raise CheckpointError(f"{folder}: already holds weights ({present[0]}); give an empty folder")
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes: expected 1 or more, found {shard_bytes}")
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    names: set[str] = set()
    taken: set[int] = set()
    held = total = 0

    def flush() -> None:
        nonlocal held
        shards.append(list(pending))
        save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        pending.clear()
        taken.clear()
        held = 0

    for name, tensor in tensors:
        if name in names:
            raise CheckpointError(f"{folder}: tensor {name!r} was given twice; expected every name once")
        names.add(name)
        if pending and held + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = _storable(name, tensor, taken)
        taken.add(pending[name].untyped_storage().data_ptr())
        held += tensor.nbytes
        total += tensor.nbytes
    if pending:
        flush()
    weight_map = {}
    for number, members in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(members, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file in set(weight_map.values()):
        shutil.copymode(folder / INDEX, folder / file)  # save_file makes files that only their owner can read
    return weight_map


def _storable(name: str, tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """``tensor`` in the dtype that stores it, in memory of its own: save_file refuses views and shared memory."""
    storage = tensor.untyped_storage()
    if not tensor.is_contiguous() or storage.nbytes() != tensor.nbytes or storage.data_ptr() in taken:
        tensor = tensor.contiguous().clone()
    if tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e8m0fnu if name.endswith(".scale") else torch.int8)
    return tensor
