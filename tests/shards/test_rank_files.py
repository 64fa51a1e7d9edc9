# SPDX-License-Identifier: Apache-2.0
"""Folders of rank files: every rank loads exactly what it would load from the checkpoint, and nothing else is accepted."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from modeling_deepseek_v41 import sharding
from modeling_deepseek_v41.cli import main
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import CheckpointError
from modeling_deepseek_v41.layout import Layout, make_layout
from modeling_deepseek_v41.loading import build_model, load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.numerics import numerics_by_name
from modeling_deepseek_v41.parallel import unconnected
from modeling_deepseek_v41.sharding import shard_checkpoint

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"
CONFIG = load_config(TINY)


class Made(NamedTuple):
    """A folder of rank files and what it was made with."""

    folder: Path
    layout: Layout
    numerics: str
    experts: str

    def load(self, rank: int, folder: Path | None = None, **options: Any) -> DeepseekV41Model:
        """``rank``'s model from the rank files, or from another ``folder``."""
        options = {"expert_weight_format": self.experts, "kernels": "torch", "progress": False, "drafter": True} | options
        numerics, layout = options.pop("numerics", self.numerics), options.pop("layout", self.layout)
        return load_model(folder or self.folder, numerics, 64, parallel=unconnected(layout, rank), **options)


def make(folder: Path, world_size: int, numerics: str = "release", experts: str = "fp4_bytes", **layout: Any) -> Made:
    made = Made(folder, make_layout(CONFIG, world_size, **layout), numerics, experts)
    shard_checkpoint(TINY, folder, made.layout, numerics, experts, progress=False)
    return made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Files of two ranks, not to be changed."""
    return make(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture
def copy(two: Made, tmp_path: Path) -> Made:
    """The same, to be damaged."""
    return two._replace(folder=shutil.copytree(two.folder, tmp_path / "copy"))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("world_size", "numerics", "experts", "layout"),
    [
        (1, "release", "bf16", {}),
        (2, "fp32", "fp8_exact", {}),
        (8, "release", "fp4_bytes", {"attn_tp_degree": 4, "moe_ep_degree": 4, "dspark_moe_ep_degree": 4}),
    ],
)
def test_every_rank_loads_what_the_checkpoint_gives_it(
    world_size: int, numerics: str, experts: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Without the checkpoint's folder; and as NxD Inference does, strictly, by state-dict name."""
    made = make(tmp_path, world_size, numerics, experts, **layout)
    for rank in range(world_size):
        expected = dict(made.load(rank, TINY).named_parameters())
        found = dict(made.load(rank).named_parameters())
        stored = load_file(tmp_path / "weights" / f"tp{rank}_sharded_checkpoint.safetensors")
        assert list(found) == list(expected) and set(stored) == set(expected)
        module = build_model(
            CONFIG, numerics_by_name(numerics), 64, experts, drafter=True, parallel=unconnected(made.layout, rank),
            weight_dtype=torch.bfloat16,
        )  # fmt: skip
        kept = dict(module.named_parameters())
        assert kept["layers.0.attn.wq_a.weight"].dtype == kept["layers.0.ffn.gate.weight"].dtype == torch.bfloat16
        for name, tensor in expected.items():
            assert torch.equal(bits(found[name]), bits(tensor)) and found[name].dtype == tensor.dtype, name
            assert stored[name].dtype == kept[name].dtype, name
            assert torch.equal(bits(stored[name].to(tensor.dtype)), bits(tensor)), name
        module.load_state_dict(stored, strict=True, assign=True)


def test_without_its_drafter(two: Made) -> None:
    model = two.load(1, drafter=False)
    assert model.drafter is None and not any(name.startswith("drafter.") for name, _ in model.named_parameters())


def test_a_prefix_and_more_tensors(tmp_path: Path) -> None:
    """What NxD Inference's application adds to a rank's weights."""
    layout = make_layout(CONFIG, 2)
    shard_checkpoint(
        TINY, tmp_path, layout, progress=False, prefix="target_model.backbone.",
        extra=lambda rank: {"target_model.rank_util.rank": torch.tensor([rank], dtype=torch.int32)},
    )  # fmt: skip
    stored = load_file(tmp_path / "weights" / "tp1_sharded_checkpoint.safetensors")
    assert stored.pop("target_model.rank_util.rank").tolist() == [1]
    expected = Made(TINY, layout, "release", "bf16").load(1)
    assert set(stored) == {f"target_model.backbone.{name}" for name, _ in expected.named_parameters()}
    assert torch.equal(stored["target_model.backbone.norm.weight"], expected.norm.weight)
    with pytest.raises(CheckpointError, match="prefix: its rank files are made for target_model"):
        Made(tmp_path, layout, "release", "bf16").load(0)
    with pytest.raises(CheckpointError, match=r"tensor target_model\.rank_util\.rank: its rank files are made for"):
        shard_checkpoint(
            TINY, tmp_path, layout, progress=False, prefix="target_model.backbone.",
            extra=lambda rank: {"target_model.rank_util.rank": torch.tensor([rank, 7], dtype=torch.int32)},
        )  # fmt: skip


def test_some_ranks_without_the_drafter(tmp_path: Path) -> None:
    layout = make_layout(CONFIG, 2)
    shard_checkpoint(TINY, tmp_path, layout, progress=False, drafter=False, ranks=[1])
    made = Made(tmp_path, layout, "release", "bf16")
    model = made.load(1, drafter=False)
    stored = load_file(tmp_path / "weights" / "tp1_sharded_checkpoint.safetensors")
    assert set(stored) == {name for name, _ in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"tp0_sharded_checkpoint\.safetensors: is missing"):
        made.load(0, drafter=False)
    with pytest.raises(CheckpointError, match="tensors of this rank are missing"):
        made.load(1)
    with pytest.raises(CheckpointError, match="drafter: its rank files are made for False, expected True"):
        shard_checkpoint(TINY, tmp_path, layout, progress=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": Layout()}, "world_size: its rank files are made for 2, expected 1"),
        (
            {"layout": make_layout(CONFIG, 2, attn_tp_degree=1)},
            "mesh: its rank files are made for [[0, 1]], expected [[0], [1]]",
        ),
        ({"layout": make_layout(CONFIG, 2, moe_ep_degree=1)}, "moe_ep_degree: its rank files are made for 2, expected 1"),
        ({"layout": make_layout(CONFIG, 2, o_proj_reduce="world")}, "o_proj_reduce: its rank files are made for group"),
        ({"numerics": "fp32"}, "dtype: its rank files are made for bfloat16, expected float32"),
        ({"expert_weight_format": "bf16"}, "expert_weight_format: its rank files are made for fp4_bytes, expected bf16"),
    ],
)
def test_files_made_for_something_else_are_refused_by_name(two: Made, options: dict[str, Any], words: str) -> None:
    """By loading, and by a run that would go on with them."""
    with pytest.raises(CheckpointError, match=re.escape(words)):
        two.load(0, **options)
    layout, numerics = options.get("layout", two.layout), options.get("numerics", two.numerics)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        shard_checkpoint(TINY, two.folder, layout, numerics, options.get("expert_weight_format", two.experts), progress=False)


def test_another_configuration_and_another_checkpoint_are_refused(copy: Made, tmp_path: Path) -> None:
    other = shutil.copytree(TINY, tmp_path / "other")
    file = other / "model-00001-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="checkpoint: its rank files are made for"):
        shard_checkpoint(other, copy.folder, copy.layout, copy.numerics, copy.experts, progress=False)
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = 7.0
    (copy.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="configuration: its rank files are made for"):
        copy.load(0)


def test_a_damaged_file_is_refused_and_written_again_alone(copy: Made) -> None:
    weights = copy.folder / "weights"
    good, bad = (weights / f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(2))
    whole = bad.read_bytes()
    for content, words in (
        (whole[:-1], f"has {len(whole) - 1} bytes, expected {len(whole)}"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "its bytes have changed: sha256"),
        (None, "is missing"),
    ):
        bad.unlink() if content is None else bad.write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(f"{bad}: {words}")):
            copy.load(1)
        copy.load(0)
        before = good.stat().st_mtime_ns
        shard_checkpoint(TINY, copy.folder, copy.layout, copy.numerics, copy.experts, progress=False)
        assert bad.read_bytes() == whole and good.stat().st_mtime_ns == before
        copy.load(1)


def test_a_manifest_that_is_none(copy: Made) -> None:
    (copy.folder / "weights" / "manifest.json").write_text('{"files": []}')
    with pytest.raises(CheckpointError, match=r"manifest\.json: is no manifest of rank files"):
        copy.load(0)


def test_rank_files_of_unknown_origin_are_left_alone(copy: Made) -> None:
    (copy.folder / "weights" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds tp0_sharded_checkpoint\.safetensors, but no manifest\.json"):
        shard_checkpoint(TINY, copy.folder, copy.layout, copy.numerics, copy.experts, progress=False)
    assert (copy.folder / "weights" / "tp0_sharded_checkpoint.safetensors").exists()


def test_the_checkpoints_own_folder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is the checkpoint's own folder"):
        shard_checkpoint(TINY, TINY, Layout(), progress=False)


@pytest.mark.parametrize("name", ["model-00001-of-00004.safetensors", "config.json"])
def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / name}: belongs to something else than")):
        make(tmp_path, 1)
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "{}"


def test_a_checkpoint_that_changed_is_another_one(tmp_path: Path) -> None:
    """In the middle of a file, where only its time tells."""
    other, out = shutil.copytree(TINY, tmp_path / "other"), tmp_path / "out"
    shard_checkpoint(other, out, Layout(), progress=False)
    file = other / "model-00001-of-00004.safetensors"
    file.write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="checkpoint: its rank files are made for"):
        shard_checkpoint(other, out, Layout(), progress=False)


def test_a_run_without_a_finished_file_binds_nobody(two: Made, tmp_path: Path) -> None:
    manifest = json.loads((two.folder / "weights" / "manifest.json").read_text())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "manifest.json.part").write_text(json.dumps(manifest | {"files": {}}))
    make(tmp_path, 1, experts="bf16").load(0)


@pytest.mark.parametrize("value", [None, "x", 1.5])
def test_a_manifest_with_a_size_that_is_none(copy: Made, value: object) -> None:
    file = copy.folder / "weights" / "manifest.json"
    content = json.loads(file.read_text())
    content["files"]["tp0_sharded_checkpoint.safetensors"]["bytes"] = value
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"manifest\.json: is no manifest of rank files"):
        copy.load(0)


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(sharding.shutil, "disk_usage", lambda folder: Usage(3 << 20))
    with pytest.raises(CheckpointError, match=r"2 rank files need \d+\.\d MiB, the disk has 3\.0 MiB; make room or give"):
        make(tmp_path, 2)
    assert not list((tmp_path / "weights").iterdir())


def test_the_command_and_generating_from_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--expert-weight-format", "fp8_exact"]
    assert main(["shard", "--model-path", str(TINY), "--out", str(tmp_path / "out"), *options]) == 0
    words = capsys.readouterr().out
    assert "weights: 1 rank files of" in words and "at most 0 on a rank" in words
    found = []
    for folder in (TINY, tmp_path / "out"):
        prompt = ["--prompt", "Every", "--max-new-tokens", "6", "--speculate", "--kernels", "torch"]
        assert main(["generate", "--model-path", str(folder), *prompt, *options]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert main(["generate", "--model-path", str(tmp_path / "out"), *prompt]) == 2
    assert "expert_weight_format: its rank files are made for fp8_exact, expected bf16" in capsys.readouterr().err
    assert main(["shard", "--model-path", str(TINY), "--out", str(tmp_path / "out"), "--world-size", "3"]) == 2
    assert "moe_ep_degree: 1 splits every expert 3 ways" in capsys.readouterr().err
