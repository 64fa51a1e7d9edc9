# SPDX-License-Identifier: Apache-2.0
"""The strict reader: every stored type against the safetensors library, and every way in which a checkpoint can be wrong."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from modeling_deepseek_v41.checkpoint import Checkpoint, is_vision, summarize
from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import CheckpointError, ConfigError

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00004.safetensors"
SCALE = "layers.0.attn.wq_a.scale"

Header = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that a test may damage."""
    copy = tmp_path / "ckpt"
    shutil.copytree(TINY, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    return copy


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


# ------------------------------------------------------------------------------------------------ a sound checkpoint


def test_every_tensor_equals_what_safetensors_reads() -> None:
    checkpoint = Checkpoint(TINY)
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    seen = set()
    for file in checkpoint.files:
        with safe_open(file, "pt") as reference:
            for name in reference.keys():  # noqa: SIM118
                want, have = reference.get_tensor(name), checkpoint.tensor(name)
                spec = checkpoint.tensors[name]
                assert have.dtype == kinds.get(spec.dtype, torch.uint8)
                assert have.shape == want.shape == spec.shape
                assert torch.equal(have.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))
                assert checkpoint.file_of(name) == file
                seen.add(name)
    assert seen == checkpoint.tensors.keys()
    checkpoint.finish()
    index = json.loads((TINY / INDEX).read_text())
    assert checkpoint.total_bytes == index["metadata"]["total_size"]
    assert [file.name for file in checkpoint.files] == sorted(set(index["weight_map"].values()))
    assert checkpoint.config == load_config(TINY)
    assert checkpoint.folder == TINY


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "layers.0.hc_attn_fn",
        "layers.0.attn.wq_b.weight",
        "layers.0.ffn.experts.3.w1.weight",
        SCALE,
        "layers.1.engram.embed.weight",
        "layers.1.engram.embed.scale",
    ],
)
def test_rows_and_map_equal_the_tensor(name: str) -> None:
    checkpoint = Checkpoint(TINY)
    whole = checkpoint.tensor(name)
    rows = whole.shape[0]
    for start, stop in ((0, rows), (0, 1), (rows - 1, rows), (1, rows // 2), (1, 1)):
        part = checkpoint.rows(name, start, stop)
        assert part.dtype == whole.dtype and part.shape == whole[start:stop].shape
        assert torch.equal(part.view(torch.uint8), whole[start:stop].view(torch.uint8))
    mapped = checkpoint.mapped(name)
    assert mapped.dtype == whole.dtype and mapped.shape == whole.shape
    assert torch.equal(mapped.view(torch.uint8), whole.view(torch.uint8))
    checkpoint.close()
    assert torch.equal(mapped[1:2].view(torch.uint8), whole[1:2].view(torch.uint8))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 513), (5, 4)])
def test_rows_outside(start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match=rf"model-.*'embed\.weight': rows {start}:{stop} are outside its 512 rows"):
        Checkpoint(TINY).rows("embed.weight", start, stop)


def test_unknown_name() -> None:
    for read in (Checkpoint.tensor, Checkpoint.mapped):
        with pytest.raises(CheckpointError, match=r"ckpt: has no tensor 'nonsense'"):
            read(Checkpoint(TINY), "nonsense")


def test_single_file_without_index(folder: Path) -> None:
    header: Header = {}
    data = bytearray()
    for file in sorted(folder.glob("*.safetensors")):
        part, content = read_parts(file)
        for name, entry in part.items():
            if name != "__metadata__":
                header[name] = entry | {"data_offsets": [offset + len(data) for offset in entry["data_offsets"]]}
        data += content
        file.unlink()
    (folder / INDEX).unlink()
    write_parts(folder / "model.safetensors", header, bytes(data))
    checkpoint = Checkpoint(folder)
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert checkpoint.tensors == Checkpoint(TINY).tensors


def test_symlinked_shards(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    assert Checkpoint(folder).tensor("norm.weight").shape == (128,)


def test_other_name_of_the_scale_type(folder: Path) -> None:
    edit(file_of(folder, SCALE), lambda header, data: header[SCALE].update(dtype="F8_E8M0FNU"))
    checkpoint = Checkpoint(folder)
    assert checkpoint.tensors[SCALE].dtype == "F8_E8M0"
    assert torch.equal(checkpoint.tensor(SCALE), Checkpoint(TINY).tensor(SCALE))


def test_given_config_replaces_the_folders(folder: Path) -> None:
    config = load_config(folder)
    (folder / "config.json").unlink()
    assert Checkpoint(folder, config).config is config
    with pytest.raises(ConfigError, match=r"config\.json"):
        Checkpoint(folder)


def test_summary() -> None:
    checkpoint = Checkpoint(TINY)
    rows = summarize(checkpoint)
    assert sum(row.tensors for row in rows) == len(checkpoint.tensors)
    assert sum(row.nbytes for row in rows) == checkpoint.total_bytes
    by_group = {row.group: row for row in rows}
    assert [row.group for row in rows if not row.used] == ["vision"]
    assert by_group["experts"].dtypes == ("F8_E8M0", "I8")
    assert by_group["experts"].tensors == 8 * 16 * 6


# ------------------------------------------------------------------------------------------------ the folder, the index


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


# ------------------------------------------------------------------------------------------------ what was read


def test_finish_names_what_nobody_read() -> None:
    checkpoint = Checkpoint(TINY)
    left = {"layers.0.attn.attn_sink", "mtp.1.attn.attn_sink"}
    for name in checkpoint.tensors:
        if name not in left and not is_vision(name):
            checkpoint.tensor(name)
    assert set(checkpoint.unread()) == left
    assert checkpoint.unread(prefixes=["mtp."]) == ["mtp.1.attn.attn_sink"]
    with pytest.raises(
        CheckpointError, match=r"ckpt: 2 tensors .*neither loaded nor declared unused: layers\.0\.attn\.attn_sink"
    ):
        checkpoint.finish()
    with pytest.raises(CheckpointError, match=r"1 tensors .*: layers\.0\.attn\.attn_sink;"):
        checkpoint.finish(lambda name: name.startswith("mtp."))
    checkpoint.rows("layers.0.attn.attn_sink", 0, 1)
    checkpoint.finish(lambda name: name.startswith("mtp."))
    checkpoint.mapped("mtp.1.attn.attn_sink")
    checkpoint.finish()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_one_file_open_at_a_time(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "ckpt")

    def open_files() -> list[str]:
        paths = [
            os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        return [path for path in paths if path.startswith(str(folder.resolve()))]

    with Checkpoint(folder) as checkpoint:
        assert open_files() == []
        for name in ("layers.1.engram.embed.weight", "embed.weight", "layers.2.engram.embed.weight"):
            kept = checkpoint.tensor(name)
            assert open_files() == [str(checkpoint.file_of(name).resolve())]
        mapped = checkpoint.mapped("embed.weight")
        assert mapped[511].isfinite().all()
        del mapped
    assert open_files() == []
    assert kept.view(torch.uint8).any()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_stays_flat(tmp_path: Path) -> None:
    def resident() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    content = json.loads((TINY / "config.json").read_text())
    content["vision_config"] = None
    content["text_config"] |= {
        "hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 512, "num_hidden_layers": 1,
        "num_nextn_predict_layers": 0, "compress_ratios": [0], "kv_source_layer_ids": [], "index_source_layer_ids": [],
        "candidate_source_layer_id": -1, "engram_layer_ids": [], "engram_num_embeddings": [],
    }  # fmt: skip
    folder = tmp_path / "big"
    write_checkpoint(content, folder, seed=0, shard_bytes=1 << 40)
    try:
        checkpoint = Checkpoint(folder)
        assert len(checkpoint.files) == 1 and checkpoint.total_bytes > 200e6
        checkpoint.tensor("embed.weight")
        before = most = resident()
        for name in checkpoint.tensors:
            checkpoint.tensor(name)
            most = max(most, resident())
        table = checkpoint.mapped("embed.weight")
        assert max(most, resident()) - before < 20e6
        assert table.shape == (512, 512)
    finally:
        shutil.rmtree(folder)
