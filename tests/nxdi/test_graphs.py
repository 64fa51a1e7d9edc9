# SPDX-License-Identifier: Apache-2.0
"""compile() up to HLO, and the traced graphs run as XLA graphs on the CPU."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sources import TINY, child, needs_nxdi

pytestmark = needs_nxdi
PLAIN = {"on_device_sampling_config": {}, "max_context_length": 32}
FUSED = PLAIN | {"enable_fused_speculation": True, "speculation_length": 6}
BUCKETS = PLAIN | {
    "enable_bucketing": True,
    "context_encoding_buckets": [16, 32],
    "token_generation_buckets": [64, 256],
    "batch_size": 2,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
}
RUNS: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain": (PLAIN, 2, 1),
    "buckets": (BUCKETS, 4, 1),
    "logits": (PLAIN | {"output_logits": True}, 2, 2),
    "fused": (FUSED, 2, 4),
    "fused and logits": (FUSED | {"output_logits": True, "batch_size": 2}, 2, 6),
}
"""Options, graphs and outputs before the state."""


@pytest.mark.parametrize("name", RUNS)
def test_one_graph_per_bucket_that_reads_nothing_on_the_host(name: str, tmp_path: Path) -> None:
    options, count, results = RUNS[name]
    [found] = child("graphs", {"options": options, "work": str(tmp_path / "out")}, tmp_path, cpu_mode=False)
    assert "neuron_xla_wlo_compile" in found["end"], "the trace is expected to end where the Neuron compiler begins"
    assert len(found["graphs"]) == count
    states = 17 if "enable_fused_speculation" in options else 14
    for graph in found["graphs"]:
        assert graph["host_reads"] == graph["mid_graph_executes"] == graph["outputs_off_device"] == 0
        assert not graph["host_fallbacks"] and not graph["dynamic_shape"] and not graph["wrong_aliases"]
        assert graph["aliases"] == list(range(results, results + states)) and graph["outputs"] == results + states
        assert graph["unread_state"] == 0


WIDE = {"num_attention_heads": 64, "n_routed_experts": 64, "dspark_n_routed_experts": 64}
"""What 64 ranks divide: with o_groups 8, attention in groups of 8 and one expert per rank."""
PLAIN_COLLECTIVES = {
    ("all-reduce", "world"): 9,
    ("all-reduce", "mesh"): 8,
    ("all-gather", "world"): 2,
    ("all-gather", "mesh"): 3,
}
"""8 layers: wo_b in the attention groups and experts over the world, each per layer; tables once; keys and values of the engram
and logits over the world; a merge in the attention group for each of the 3 index sources."""


def collectives(lines: list[str]) -> dict[tuple[str, str], int]:
    """How many of each kind over which groups: the world, or NxDI's 8 x 8 mesh for a trn2."""
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        kind = "all-reduce" if " all-reduce(" in line else "all-gather" if " all-gather(" in line else "another"
        groups = line.split("replica_groups=")[1]
        where = "mesh" if groups.startswith("{{0,1,2,3,12,13,14,15},{4,5,6,7,8,9,10,11},") else "another"
        found[kind, "world" if groups.startswith("{{" + ",".join(map(str, range(64))) + "}}") else where] += 1
    return dict(found)


@pytest.mark.parametrize("options", [PLAIN, pytest.param(FUSED, marks=pytest.mark.slow)], ids=["plain", "fused"])
def test_64_ranks_on_the_device_s_mesh(options: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(TINY / "ckpt", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= WIDE
    (folder / "config.json").write_text(json.dumps(config))
    arguments = {"options": options | {"tp_degree": 64}, "work": str(tmp_path / "out"), "folder": str(folder)}
    [found] = child("graphs", arguments, tmp_path, cpu_mode=False)
    assert len(found["graphs"]) == 2
    for graph in found["graphs"]:
        assert graph["host_reads"] == graph["mid_graph_executes"] == 0
        assert not graph["host_fallbacks"] and not graph["dynamic_shape"] and not graph["wrong_aliases"]
        known = collectives(graph["collectives"])
        assert {where for _, where in known} == {"world", "mesh"}
        if options is PLAIN:
            assert known == PLAIN_COLLECTIVES


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, FUSED], ids=["plain", "fused"])
def test_graphs_give_the_reference_s_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    [found] = child("execute", {"options": options, "length": 40}, tmp_path, cpu_mode=False)
    assert found["tokens"] == load_file(TINY / "golden_f32.safetensors")["p40.generated"].tolist()
