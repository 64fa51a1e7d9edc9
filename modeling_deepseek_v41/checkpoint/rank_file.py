# SPDX-License-Identifier: Apache-2.0
"""One rank's weights as one safetensors file: made in place through a memory map, and read strictly.

Pages of a mapped file belong to the system's file cache, so writing takes no memory of the process, whatever the file's size.
"""

import errno
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError
from .index import some
from .shard import StoredTensor, read_header

PART = ".part"
"""Behind the name of a file that is not finished."""

STORED_AS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}

_CHUNK = 8 << 20


def lay_out(file: Path, tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, StoredTensor]]:
    """The first bytes of a safetensors file of ``tensors``, which may be on the meta device, and where each one will lie.

    Wide types come first, so that every tensor begins at a multiple of its element's size.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        offsets = [end, end + tensor.nbytes]
        entries[name] = {"dtype": STORED_AS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin, places = 8 + len(text), {}
    for name in order:
        tensor = tensors[name]
        places[name] = StoredTensor(file, STORED_AS[tensor.dtype], tuple(tensor.shape), begin, tensor.nbytes)
        begin += tensor.nbytes
    return len(text).to_bytes(8, "little") + text, places


def file_size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a file of ``tensors``, which may be on the meta device."""
    header, places = lay_out(Path(), tensors)
    return len(header) + sum(place.nbytes for place in places.values())


@contextmanager
def new_file(file: Path, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The content of a new ``file`` as memory to be filled: a tensor of zeros like each of ``tensors``, under its name.

    The file has the suffix ``.part`` until the block ends without an error and its bytes are on the disk; after an error it is
    removed. Raises CheckpointError where the disk has no room for it. The tensors stay valid after the block.
    """
    header, places = lay_out(file, tensors)
    part = file.with_name(file.name + PART)
    try:
        with part.open("w+b") as handle:
            _reserve(handle, part, len(header) + sum(place.nbytes for place in places.values()))
            mapping = mmap.mmap(handle.fileno(), 0)
            mapping[: len(header)] = header
            yield {name: _view(mapping, place, tensors[name].dtype) for name, place in places.items()}
            mapping.flush()
            os.fsync(handle.fileno())
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _view(mapping: mmap.mmap, place: StoredTensor, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mapping, dtype=dtype, count=math.prod(place.shape), offset=place.start).view(place.shape)


def _reserve(handle: BinaryIO, file: Path, size: int) -> None:
    """Makes ``handle`` ``size`` zeros, on the disk where it can: with a full disk a write to a map would end the process."""
    handle.truncate(size)
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle.fileno(), 0, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CheckpointError(f"{file}: the disk has no room for its {size} bytes; make room and run again") from None
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def sha256(file: Path, done: Callable[[int], None] = lambda count: None) -> str:
    """The hash of the file's bytes; ``done`` is told how many were read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
            done(count)
    return digest.hexdigest()


def stored_tensors(file: Path, expected: Mapping[str, Tensor], unused: str | None = None) -> dict[str, StoredTensor]:
    """Where ``expected``, which may be on the meta device, lies in ``file``; names beginning with ``unused`` may be there too.

    Raises CheckpointError where names, dtypes or shapes differ; bf16 may be there for fp32, which holds its values.
    """
    stored = read_header(file)
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected and not (unused and name.startswith(unused))]
    if missing or extra:
        raise CheckpointError(
            f"{file}: {len(missing)} tensors of this rank are missing ({some(missing)}) and {len(extra)} have no place in it"
            f" ({some(extra)}); make the rank files again"
        )
    for name, tensor in expected.items():
        found, wanted = (stored[name].dtype, stored[name].shape), (STORED_AS[tensor.dtype], tuple(tensor.shape))
        is_narrow = tensor.dtype == torch.float32 and found == ("BF16", wanted[1])
        if not (found == wanted or is_narrow) or stored[name].nbytes != tensor.nbytes // (2 if is_narrow else 1):
            raise CheckpointError(
                f"{file}: tensor {name!r}: found {found[0]} {list(found[1])}, expected {wanted[0]} {list(wanted[1])};"
                " make the rank files again"
            )
    return {name: stored[name] for name in expected}
