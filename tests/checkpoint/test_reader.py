# SPDX-License-Identifier: Apache-2.0
"""The strict reader on a sound checkpoint: every stored type against the safetensors library, and what it records."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from damage import (
    INDEX,
    SCALE,
    TINY,
    Header,
    edit,
    file_of,
    read_parts,
    write_parts,
)
from safetensors import safe_open

from modeling_deepseek_v41.checkpoint import Checkpoint, is_vision, summarize
from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import CheckpointError, ConfigError


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
