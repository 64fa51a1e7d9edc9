# SPDX-License-Identifier: Apache-2.0
"""How much memory sharding takes beyond the system's file cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "benchmark_config.json"

SHARDS = """
import re, sys, threading
from pathlib import Path
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.layout import make_layout
from modeling_deepseek_v41.sharding import shard_checkpoint

most, ended = 0, threading.Event()

def watch():
    global most
    while not ended.wait(0.01):
        most = max(most, int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))

watcher = threading.Thread(target=watch)
watcher.start()
folder, out = sys.argv[1:]
shard_checkpoint(folder, out, make_layout(load_config(folder), 2), expert_weight_format="fp8_exact", progress=False)
ended.set()
watcher.join()
print(most * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_sharding_2_gb_takes_less_than_1_gb(tmp_path: Path) -> None:
    """The interpreter and PyTorch included."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config["text_config"] |= {"n_routed_experts": 176, "dspark_n_routed_experts": 88}
    config.pop("vision_config")
    write_checkpoint(config, tmp_path / "ckpt", seed=1, shard_bytes=256 << 20)
    stored = sum(file.stat().st_size for file in (tmp_path / "ckpt").glob("*.safetensors"))
    assert stored > 2e9
    command = [sys.executable, "-c", SHARDS, str(tmp_path / "ckpt"), str(tmp_path / "out")]
    most = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{stored / 1e9:.2f} GB sharded with at most {most / 1e9:.2f} GB beyond the file cache")
    assert most < 1e9
