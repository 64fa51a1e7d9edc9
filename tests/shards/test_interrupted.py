# SPDX-License-Identifier: Apache-2.0
"""Sharding that is broken off anywhere leaves nothing that loads, and goes on with what is whole."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modeling_deepseek_v41 import sharding
from modeling_deepseek_v41.checkpoint import rank_file
from modeling_deepseek_v41.checkpoint.rank import RankCheckpoint
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import DeepseekV41Error
from modeling_deepseek_v41.layout import make_layout
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.parallel import unconnected
from modeling_deepseek_v41.shard_manifest import Manifest
from modeling_deepseek_v41.sharding import shard_checkpoint

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"
LAYOUT = make_layout(load_config(TINY), 2)
RANKS = [f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(2)]

STAGES = {
    "before anything": (sharding, "made_for", 1, 0),
    "before the first record": (Manifest, "write", 1, 0),
    "with a file begun": (rank_file, "_view", 5, 0),
    "in the middle of a file": (RankCheckpoint, "tensor", 40, 0),
    "before a file gets its name": (os, "fsync", 1, 0),
    "before it is recorded": (Manifest, "write", 2, 0),
    "in the second file": (RankCheckpoint, "linear", 150, 1),
    "before the second is recorded": (Manifest, "write", 3, 1),
    "before the manifest gets its name": (sharding.shutil, "copyfile", 1, 2),
}
"""What is called so many times when a run ends, and how many whole and recorded files it leaves."""


def run(folder: Path) -> None:
    shard_checkpoint(TINY, folder, LAYOUT, "release", "fp8_exact", progress=False)


def ends_at(call: int, ending: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, but its ``call``th call is the ``ending``."""
    calls = [0]

    def counting(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            ending()
        return original(*args, **options)

    return counting


def error() -> None:
    raise KeyboardInterrupt


def killed() -> None:
    """As by a kill: nothing is cleaned up."""
    os._exit(9)


def run_that_ends(stage: str, ending: Callable[[], None], folder: Path) -> None:
    owner, name, call, _ = STAGES[stage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, ends_at(call, ending, getattr(owner, name)))
        run(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The rank files of a run that is not broken off."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return [(folder / "weights" / name).read_bytes() for name in RANKS]


@pytest.mark.parametrize("kill", [False, True], ids=["error", "kill"])
@pytest.mark.parametrize("stage", list(STAGES))
def test_a_run_goes_on(stage: str, kill: bool, whole: list[bytes], tmp_path: Path) -> None:
    weights, kept = tmp_path / "weights", STAGES[stage][-1]
    if kill:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["modeling_deepseek_v41.sharding", "pytest"])
        process = context.Process(target=run_that_ends, args=(stage, killed, tmp_path))
        process.start()
        process.join()
        assert process.exitcode == 9
    else:
        with pytest.raises(KeyboardInterrupt):
            run_that_ends(stage, error, tmp_path)
    assert not (weights / "manifest.json").exists()
    words = "not finished" if (weights / "manifest.json.part").exists() else r"config\.json: cannot be read"
    with pytest.raises(DeepseekV41Error, match=words):
        load_model(tmp_path, expert_weight_format="fp8_exact", progress=False, parallel=unconnected(LAYOUT, 0))
    before = {name: (weights / name).stat().st_mtime_ns for name in RANKS[:kept]}
    run(tmp_path)
    assert [(weights / name).read_bytes() for name in RANKS] == whole
    assert {name: (weights / name).stat().st_mtime_ns for name in before} == before
    assert sorted(file.name for file in weights.iterdir()) == ["manifest.json", *RANKS]
    load_model(tmp_path, expert_weight_format="fp8_exact", kernels="torch", progress=False, parallel=unconnected(LAYOUT, 1))


def test_a_record_does_not_save_a_file_that_changed_since(whole: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_that_ends("before the second is recorded", error, tmp_path)
    file = tmp_path / "weights" / RANKS[0]
    file.write_bytes(whole[0][:-1] + b"\1")
    run(tmp_path)
    assert [(tmp_path / "weights" / name).read_bytes() for name in RANKS] == whole
