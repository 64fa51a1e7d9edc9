# SPDX-License-Identifier: Apache-2.0
"""compile() up to HLO, and the traced graphs run as XLA graphs on the CPU."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from sources import TINY, child
from texts import golden

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.plan import Settings, make_plan
from modeling_deepseek_v41.plan.check import DSPARK, PROMPT
from modeling_deepseek_v41.plan.check import PLAIN as PLAIN_STEP

pytestmark = pytest.mark.nxdi
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
    "drawn": (PLAIN | {"on_device_sampling_config": {"do_sample": True, "global_topk": 64}}, 2, 1),
    "fused": (FUSED, 2, 4),
    "fused and logits": (FUSED | {"output_logits": True, "batch_size": 2}, 2, 6),
}
"""Options, graphs and outputs before the state."""


def check(graph: dict[str, Any]) -> None:
    """Nothing read on the host, no shape that depends on data, no sort but a top-k's.

    torch_xla writes a top-k as a sort and a slice, which Neuron's compiler knows (aws-neuron-sdk issue 1339); it may not have
    a sort by itself (issue 868).
    """
    assert graph["host_reads"] == graph["mid_graph_executes"] == graph["outputs_off_device"] == 0
    assert not graph["host_fallbacks"] and not graph["dynamic_shape"] and not graph["wrong_aliases"]
    assert set(graph["sorts"]) <= {"aten__topk"}


@pytest.mark.parametrize("name", RUNS)
def test_one_graph_per_bucket_that_reads_nothing_on_the_host(name: str, tmp_path: Path) -> None:
    options, count, results = RUNS[name]
    [found] = child("graphs", {"options": options, "work": str(tmp_path / "out")}, tmp_path, cpu_mode=False)
    assert "neuron_xla_wlo_compile" in found["end"], "the trace is expected to end where the Neuron compiler begins"
    assert len(found["graphs"]) == count
    states = 17 if "enable_fused_speculation" in options else 14
    for graph in found["graphs"]:
        check(graph)
        assert graph["aliases"] == list(range(results, results + states)) and graph["outputs"] == results + states
        assert graph["unread_state"] == 0


WIDE = {"num_attention_heads": 64, "n_routed_experts": 64, "dspark_n_routed_experts": 64}
"""What 64 ranks divide: with o_groups 8, attention in groups of 8 and one expert per rank."""
PLAIN_PROMPT = {
    ("world", "sum"): 9,
    ("attention", "sum"): 8,
    ("world", "gather"): 2,
    ("attention", "gather"): 3,
}
"""8 layers: experts over the world and wo_b in the attention groups, each per layer; tables once; keys and values of the engram
and logits over the world; a merge in the attention group for each of the 3 index sources."""
WORLD = "{{" + ",".join(map(str, range(64))) + "}}"
MESH = "{{0,1,2,3,12,13,14,15},{4,5,6,7,8,9,10,11},"
"""The beginning of NxDI's 8 x 8 mesh for a trn2."""
BYTES = {"f32": 4, "bf16": 2}


def exchanges(lines: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """How many of each kind over which groups, and the bytes of their results, as the plan counts them."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for line in lines:
        kind = next(name for name, word in (("sum", " all-reduce("), ("gather", " all-gather(")) if word in line)
        groups = line.split("replica_groups=")[1]
        where = next(name for name, start in (("world", WORLD), ("attention", MESH)) if groups.startswith(start))
        dtype, shape = re.findall(r"= \(?(\w+)\[([\d,]*)\]", line)[0]
        count, nbytes = found.get((where, kind), (0, 0))
        found[where, kind] = count + 1, nbytes + BYTES[dtype] * math.prod(map(int, shape.split(",")))
    return found


@pytest.mark.parametrize("options", [PLAIN, FUSED], ids=["plain", "fused"])
def test_64_ranks_on_the_device_s_mesh_exchange_what_the_plan_counts(options: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(TINY / "ckpt", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= WIDE
    (folder / "config.json").write_text(json.dumps(config))
    run = options | {"tp_degree": 64, "torch_dtype": "bfloat16"}
    [found] = child("graphs", {"options": run, "work": str(tmp_path / "out"), "folder": str(folder)}, tmp_path, cpu_mode=False)
    prompt, step = found["graphs"]
    for graph in (prompt, step):
        check(graph)
    plan = make_plan(load_config(folder), Settings(world_size=64, seq_len=256, batch=1, buckets=(32,)))
    planned = {
        stage.name: {key: (entry.count, entry.nbytes) for key, entry in stage.costs.exchanges.items()} for stage in plan.stages
    }
    assert exchanges(step["collectives"]) == planned[DSPARK if options is FUSED else PLAIN_STEP]
    if options is FUSED:
        assert exchanges(prompt["collectives"]) == planned[PROMPT]
    else:  # the plan's prompts are shown to the drafter too
        assert {key: count for key, (count, _) in exchanges(prompt["collectives"]).items()} == PLAIN_PROMPT


@pytest.mark.parametrize("kept", ["bf16", "fp4_bytes"])
def test_other_formats_of_experts(kept: str, tmp_path: Path) -> None:
    options = FUSED | {"torch_dtype": "bfloat16", "expert_weight_format": kept}
    [found] = child("graphs", {"options": options, "work": str(tmp_path / "out")}, tmp_path, cpu_mode=False)
    assert len(found["graphs"]) == 2
    for graph in found["graphs"]:
        check(graph)


def test_kernels_reach_the_trace(tmp_path: Path) -> None:
    """As far as the first kernel, which the stand-in of ``nki`` cannot run."""
    options = PLAIN | {"torch_dtype": "bfloat16", "kernels": "nki"}
    [found] = child("graphs", {"options": options, "work": str(tmp_path / "out")}, tmp_path, cpu_mode=False)
    assert found["end"].startswith("kernel ") and not found["graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, FUSED], ids=["plain", "fused"])
def test_graphs_give_the_reference_s_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    prompts, expected = golden([40])
    [found] = child("execute", {"options": options, "texts": prompts}, tmp_path, cpu_mode=False)
    assert found["tokens"] == expected
