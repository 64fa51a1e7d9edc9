# SPDX-License-Identifier: Apache-2.0
"""Ways to damage a copy of the golden checkpoint, and to require that it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modeling_deepseek_v41.checkpoint import Checkpoint
from modeling_deepseek_v41.errors import CheckpointError

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00004.safetensors"
SCALE = "layers.0.attn.wq_a.scale"

Header = dict[str, Any]


def read_parts(file: Path) -> tuple[Header, bytearray]:
    """Header and data of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])


def write_parts(file: Path, header: Header | bytes, data: bytes) -> None:
    """Writes a safetensors file with whatever header it is given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit(file: Path, change: Callable[[Header, bytearray], Any]) -> None:
    """Lets ``change`` alter header and data of ``file``."""
    header, data = read_parts(file)
    change(header, data)
    write_parts(file, header, bytes(data))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Lets ``change`` alter the weight map."""
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def file_of(folder: Path, name: str) -> Path:
    """The shard that holds ``name``."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def drop(folder: Path, *names: str) -> None:
    """Removes tensors from their shard (which stays well-formed) and from the index."""
    for name in names:

        def change(header: Header, data: bytearray, name: str = name) -> None:
            begin, end = header.pop(name)["data_offsets"]
            del data[begin:end]
            for key, entry in header.items():
                if key != "__metadata__" and entry["data_offsets"][0] >= end:
                    entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]

        edit(file_of(folder, name), change)
        edit_index(folder, lambda weight_map, name=name: weight_map.pop(name))


def set_byte(folder: Path, name: str, position: int, value: bytes) -> None:
    """Overwrites bytes of the tensor ``name``, from byte ``position`` of it on."""

    def change(header: Header, data: bytearray) -> None:
        begin = header[name]["data_offsets"][0] + position
        data[begin : begin + len(value)] = value

    edit(file_of(folder, name), change)


def refused(folder: Path, *parts: str) -> None:
    """Opening ``folder`` raises one CheckpointError whose message has every part."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.__cause__ is None
