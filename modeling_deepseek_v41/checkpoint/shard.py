# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: its header, checked against the file's size, and reads of byte ranges.

The files are read with plain reads rather than through safetensors' memory map: every page that a map has touched stays
in the process's resident memory until the whole file is released (measured: +400 MiB after walking through a file of 400
MiB, against +0 here), and shards of the release are up to 98 GB. Reading the bytes also works with versions of
safetensors that do not know F8_E8M0.
"""

import dataclasses
import json
import math
import mmap
import warnings
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch

from ..errors import CheckpointError
from .spec import BYTES

MAX_HEADER = 100_000_000
"""The largest header, in bytes, that the safetensors format allows."""

ALIASES = {"F8_E8M0FNU": "F8_E8M0", "F8_E4M3FN": "F8_E4M3"}
"""Other names that converters write for the same bytes."""

AGAIN = "download or convert this file again"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, safetensors dtype, stored shape, and its bytes' absolute offset and number."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def load_json(file: Path, text: bytes | str | None = None) -> dict[str, Any]:
    """Parses a JSON object (``text``, or the content of ``file``) and refuses repeated keys; raises CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"{twice!r} stands there twice")
        return result

    try:
        value = json.loads(file.read_bytes() if text is None else text, object_pairs_hook=unique)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error}); {AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}; {AGAIN}")
    return value


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors that the safetensors file ``file`` declares, by name; reads only its header.

    Raises CheckpointError where the header is broken, or where the file is shorter or longer than the header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{file}: is truncated or no safetensors file: its header should take {length} bytes, the file has {size};"
                    f" {AGAIN}"
                )
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        entries = load_json(file, text)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: broken safetensors header: {str(error).removeprefix(f'{file}: ')}") from None
    data = 8 + length
    tensors = {name: _entry(file, data, name, entry) for name, entry in entries.items() if name != "__metadata__"}
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != end:
            raise CheckpointError(
                f"{file}: tensor {name!r}: broken safetensors header: its bytes begin at {tensor.start - data}, those before"
                f" it end at {end - data}; {AGAIN}"
            )
        end += tensor.nbytes
    if end > size:
        cut = next(name for name, tensor in tensors.items() if tensor.start + tensor.nbytes > size)
        raise CheckpointError(
            f"{file}: is truncated: {size} bytes, expected {end}; the first tensor cut off is {cut!r}; {AGAIN}"
        )
    if end < size:
        raise CheckpointError(f"{file}: {size - end} bytes behind the last tensor; expected {end} bytes; {AGAIN}")
    return tensors


def _entry(file: Path, data: int, name: str, entry: Any) -> StoredTensor:
    where = f"{file}: tensor {name!r}: broken safetensors header"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {entry!r}; {AGAIN}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: dtype {dtype!r}, shape {shape!r}, data_offsets {offsets!r}; {AGAIN}")
    dtype = ALIASES.get(dtype, dtype)
    nbytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * BYTES[dtype] if dtype in BYTES else nbytes
    if nbytes < 0 or nbytes != expected:
        raise CheckpointError(f"{where}: {dtype} of shape {shape} takes {expected} bytes, the file gives it {nbytes}; {AGAIN}")
    return StoredTensor(file, dtype, tuple(shape), data + offsets[0], nbytes)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class ShardReader:
    """Reads byte ranges; keeps the file of the last read open, and only that one."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._handle: BinaryIO | None = None

    def read(self, file: Path, start: int, out: torch.Tensor) -> None:
        """Fills ``out`` (contiguous uint8) with the bytes of ``file`` from ``start`` on; raises CheckpointError."""
        try:
            if file != self._file or self._handle is None:
                self.close()
                self._file, self._handle = file, file.open("rb", buffering=0)
            self._handle.seek(start)
            target = out.numpy().data
            while target:
                count = self._handle.readinto(target)  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{file}: ends {len(target)} bytes early; it changed after it was opened; {AGAIN}")
                target = target[count:]
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None

    def close(self) -> None:
        """Closes the open file, if there is one; a later read opens again."""
        if self._handle is not None:
            self._handle.close()
        self._file = self._handle = None


def map_bytes(tensor: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """The stored bytes as a memory-mapped ``dtype`` tensor of the stored shape, **read-only**: writing to it crashes.

    Pages come in when they are touched, one by one (no read-ahead), and the system may drop them again. The file stays
    mapped for as long as the tensor lives. Raises CheckpointError where the file cannot be mapped.
    """
    aligned = tensor.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    skip = tensor.start - aligned
    try:
        with tensor.file.open("rb") as handle:
            mapping = mmap.mmap(handle.fileno(), skip + tensor.nbytes, access=mmap.ACCESS_READ, offset=aligned)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file}: cannot be mapped into memory ({error})") from None
    if hasattr(mapping, "madvise") and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(mapping, dtype=dtype, count=math.prod(tensor.shape), offset=skip)
    return flat.view(tensor.shape)
