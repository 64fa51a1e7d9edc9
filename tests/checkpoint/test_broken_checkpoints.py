# SPDX-License-Identifier: Apache-2.0
"""Every way in which a checkpoint can be wrong: one clear error each, naming file and tensor."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from damage import (
    FIRST,
    INDEX,
    SCALE,
    TINY,
    Header,
    drop,
    edit,
    edit_index,
    file_of,
    read_parts,
    refused,
    set_byte,
    write_parts,
)

from modeling_deepseek_v41.checkpoint import Checkpoint
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import CheckpointError


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: is not a folder; give the folder"):
        Checkpoint(tmp_path / "nowhere", load_config(TINY))


def test_no_weights(folder: Path) -> None:
    (folder / INDEX).unlink()
    refused(folder, str(folder), f"holds neither {INDEX} nor model.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "weight_map: expected an object of tensor names and files, found None"),
        ('{"weight_map": {}}', "weight_map: expected an object"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' stands there twice"),
        ('{"weight_map": {"a": 3}}', "tensor 'a': expected a file name, found 3"),
        ('{"weight_map": {"a": ""}}', "tensor 'a': expected a file name, found ''"),
    ],
)
def test_broken_index(folder: Path, content: str, message: str) -> None:
    (folder / INDEX).write_text(content)
    refused(folder, str(folder / INDEX), message)


@pytest.mark.parametrize("target", ["/etc/passwd", "../other.safetensors", "a/../../b", "C:\\x.safetensors", "..\\x", "C:x"])
def test_index_points_outside(folder: Path, target: str) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({SCALE: target}))
    refused(folder, str(folder / INDEX), repr(SCALE), "points outside the checkpoint folder", repr(target))


def test_missing_shards(folder: Path) -> None:
    (folder / FIRST).unlink()
    refused(folder, INDEX, f"1 of 4 files that it names are missing: {FIRST}", "download")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    refused(folder, "4 of 4 files", FIRST, "and 1 more")


def test_shard_is_a_folder(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()
    refused(folder, f"1 of 4 files that it names are missing: {FIRST}")


def test_tensor_only_in_the_index(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({"ghost.weight": FIRST}))
    refused(folder, str(folder / FIRST), f"1 tensors that {INDEX} places in this file are not in it: ghost.weight")


def test_tensor_only_in_the_shard(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.pop(SCALE))
    refused(folder, str(file_of(TINY, SCALE).name), f"1 tensors of this file are not placed in it by {INDEX}: {SCALE}")


# ------------------------------------------------------------------------------------------------ shards and headers


@pytest.mark.parametrize("keep", [0, 5, 8, 1000])
def test_truncated_in_the_header(folder: Path, keep: int) -> None:
    os.truncate(folder / FIRST, keep)
    refused(folder, str(folder / FIRST), "is truncated or no safetensors file", f"the file has {keep}")


def test_truncated_in_the_data(folder: Path) -> None:
    file = folder / FIRST
    size = file.stat().st_size
    header, _ = read_parts(file)
    last = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"][1])
    os.truncate(file, size - 1)
    refused(folder, str(file), f"is truncated: {size - 1} bytes, expected {size}", repr(last), "download")


def test_bytes_behind_the_end(folder: Path) -> None:
    with (folder / FIRST).open("ab") as file:
        file.write(b"more")
    refused(folder, str(folder / FIRST), "4 bytes behind the last tensor")


def test_header_is_no_json(folder: Path) -> None:
    write_parts(folder / FIRST, b'{"a": ', b"")
    refused(folder, str(folder / FIRST), "broken safetensors header: is not valid JSON")
    write_parts(folder / FIRST, b"\xff\xfe\xff", b"")
    refused(folder, str(folder / FIRST), "broken safetensors header: is not valid JSON")
    write_parts(folder / FIRST, b'{"a": {}, "a": {}}', b"")
    refused(folder, str(folder / FIRST), "broken safetensors header", "'a' stands there twice")


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"dtype": "F8_E8M0", "shape": [2, 4], "data_offsets": [0]},
        {"dtype": "F8_E8M0", "shape": [2, -4], "data_offsets": [0, 8]},
        {"dtype": "F8_E8M0", "shape": [2, 4.0], "data_offsets": [0, 8]},
        {"dtype": 8, "shape": [2, 4], "data_offsets": [0, 8]},
        {"dtype": "F8_E8M0", "shape": [2, 4], "data_offsets": ["0", "8"]},
    ],
)
def test_broken_entry(folder: Path, entry: Any) -> None:
    edit(file_of(folder, SCALE), lambda header, data: header.update({SCALE: entry}))
    refused(folder, file_of(folder, SCALE).name, repr(SCALE), "broken safetensors header")


def test_size_that_does_not_follow_from_the_shape(folder: Path) -> None:
    edit(file_of(folder, SCALE), lambda header, data: header[SCALE].update(shape=[2, 5]))
    refused(folder, repr(SCALE), "F8_E8M0 of shape [2, 5] takes 10 bytes, the file gives it 8")


def test_overlapping_tensors(folder: Path) -> None:
    def change(header: Header, data: bytearray) -> None:
        header[SCALE]["data_offsets"] = [offset + 3 for offset in header[SCALE]["data_offsets"]]

    edit(file_of(folder, SCALE), change)
    refused(folder, file_of(folder, SCALE).name, "broken safetensors header: its bytes begin at")


def test_file_that_changes_after_opening(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    os.truncate(file_of(folder, "embed.weight"), 100_000)
    with pytest.raises(CheckpointError, match=r"model-.*: ends \d+ bytes early; it changed after it was opened"):
        for name in checkpoint.tensors:
            checkpoint.tensor(name)
    for file in checkpoint.files:
        file.unlink()
    checkpoint.close()
    for read in (Checkpoint.tensor, Checkpoint.mapped):
        with pytest.raises(CheckpointError, match=r"model-.*\.safetensors: cannot be"):
            read(checkpoint, "norm.weight")


# ------------------------------------------------------------------------------------------------ strict both ways


def test_missing_tensors(folder: Path) -> None:
    drop(folder, "mtp.2.markov_head.embed.weight")
    refused(folder, INDEX, "1 tensors that the configuration asks for are missing: mtp.2.markov_head.embed.weight;")
    drop(folder, *(f"layers.0.ffn.experts.{expert}.w1.scale" for expert in range(5)))
    refused(folder, "6 tensors", "layers.0.ffn.experts.2.w1.scale and 3 more")


def test_unexpected_tensors(folder: Path) -> None:
    def change(header: Header, data: bytearray) -> None:
        for number in range(4):
            header[f"extra.{number}.weight"] = {"dtype": "BF16", "shape": [1], "data_offsets": [len(data), len(data) + 2]}
            data += b"\0\0"

    edit(folder / FIRST, change)
    edit_index(folder, lambda weight_map: weight_map.update({f"extra.{number}.weight": FIRST for number in range(4)}))
    refused(folder, "4 tensors have no place in the model", f"extra.0.weight ({FIRST})", "and 1 more")


def test_other_configuration(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["text_config"]["index_source_layer_ids"] = [2, 4, 5, 6]
    (folder / "config.json").write_text(json.dumps(content))
    refused(folder, "3 tensors that the configuration asks for are missing: layers.5.attn.indexer.wq_b.weight")
    content["text_config"]["index_source_layer_ids"] = [2, 4]
    (folder / "config.json").write_text(json.dumps(content))
    refused(folder, "3 tensors have no place in the model", "layers.6.attn.indexer")


def test_vision_may_be_absent_or_unknown(folder: Path) -> None:
    drop(folder, "image_end", "vision.norm.weight")
    assert "image_end" not in Checkpoint(folder).tensors


def test_wrong_shape(folder: Path) -> None:
    edit(file_of(folder, SCALE), lambda header, data: header[SCALE].update(shape=[4, 2]))
    refused(folder, file_of(folder, SCALE).name, repr(SCALE), "shape [4, 2], expected [2, 4]", "config.json")


def test_many_wrong_shapes(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["text_config"]["vocab_size"] = 544
    (folder / "config.json").write_text(json.dumps(content))
    refused(
        folder, "'embed.weight': shape [512, 128], expected [544, 128] (and 3 more tensors with another shape: head.weight,"
    )


@pytest.mark.parametrize(
    ("name", "dtype", "want"),
    [
        (SCALE, "U8", "F8_E8M0"),
        (SCALE, "I8", "F8_E8M0"),
        ("layers.0.attn.wq_a.weight", "F8_E5M2", "F8_E4M3"),
        ("layers.0.attn.wq_a.weight", "I8", "F8_E4M3"),
        ("layers.0.ffn.experts.0.w1.weight", "U8", "I8"),
        ("norm.weight", "F16", "BF16"),
        ("layers.0.attn.attn_sink", "I32", "F32"),
        ("vision.norm.weight", "F16", "one of BF16, F32"),
    ],
)
def test_wrong_type(folder: Path, name: str, dtype: str, want: str) -> None:
    edit(file_of(folder, name), lambda header, data: header[name].update(dtype=dtype))
    refused(folder, file_of(folder, name).name, repr(name), f"stored type {dtype}, expected {want}")


# ------------------------------------------------------------------------------------------------ values


BAD_VALUES = [
    (SCALE, 6, b"\xff", "scale byte 255, which means NaN", [1, 2]),
    ("layers.0.ffn.experts.0.w1.scale", 5, b"\xff", "scale byte 255", [1, 1]),
    ("layers.1.engram.embed.scale", 1000, b"\xff", "scale byte 255", [1000, 0]),
    ("layers.0.attn.wq_a.weight", 130, b"\x7f", "an e4m3 NaN", [1, 2]),
    ("layers.0.attn.wq_a.weight", 131, b"\xff", "an e4m3 NaN", [1, 3]),
    ("layers.1.engram.embed.weight", 32 * 700 + 3, b"\xff", "an e4m3 NaN", [700, 3]),
    ("norm.weight", 8, b"\x80\x7f", "a value that is not finite", [4]),
    ("norm.weight", 8, b"\x80\xff", "a value that is not finite", [4]),
    ("embed.weight", 256 * 9 + 4, b"\xc0\x7f", "a value that is not finite", [9, 2]),
    ("layers.0.attn.attn_sink", 12, b"\x00\x00\x80\x7f", "a value that is not finite", [3]),
    ("layers.0.hc_attn_fn", 2048 + 4, b"\x00\x00\xc0\xff", "a value that is not finite", [1, 1]),
]


@pytest.mark.parametrize(("name", "position", "value", "meaning", "index"), BAD_VALUES)
def test_bad_values(folder: Path, name: str, position: int, value: bytes, meaning: str, index: list[int]) -> None:
    set_byte(folder, name, position, value)
    checkpoint = Checkpoint(folder)
    file = file_of(folder, name)
    message = re.escape(f"{file}: tensor {name!r}: {meaning}") + ".*" + re.escape(f"at index {index}")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(name)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.rows(name, index[0], index[0] + 1)
    assert checkpoint.rows(name, 0, index[0]).shape[0] == index[0]
    if name.endswith(".scale"):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.mapped(name)


def test_values_at_the_border_are_good(folder: Path) -> None:
    set_byte(folder, SCALE, 0, b"\x00\xfe")
    set_byte(folder, "layers.0.attn.wq_a.weight", 0, b"\x7e\xfe\x00\x80")
    set_byte(folder, "norm.weight", 0, b"\x7f\x7f\x01\x00")
    set_byte(folder, "layers.0.attn.attn_sink", 0, b"\xff\xff\x7f\xff")
    set_byte(folder, "layers.0.ffn.experts.0.w1.weight", 0, b"\x7f\xff\x80")
    checkpoint = Checkpoint(folder)
    assert checkpoint.tensor(SCALE)[0, :2].tolist() == [0, 254]
    assert checkpoint.tensor("layers.0.attn.wq_a.weight").float()[0, :4].tolist() == [448, -448, 0, 0]
    assert checkpoint.tensor("layers.0.ffn.experts.0.w1.weight")[0, :3].tolist() == [0x7F, 0xFF, 0x80]
    assert checkpoint.tensor("norm.weight").isfinite().all() and checkpoint.tensor("layers.0.attn.attn_sink").isfinite().all()
