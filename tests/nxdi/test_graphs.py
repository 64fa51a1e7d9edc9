# SPDX-License-Identifier: Apache-2.0
"""compile() up to HLO, and the traced graphs run as XLA graphs on the CPU."""

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


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, FUSED], ids=["plain", "fused"])
def test_graphs_give_the_reference_s_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    [found] = child("execute", {"options": options, "length": 40}, tmp_path, cpu_mode=False)
    assert found["tokens"] == load_file(TINY / "golden_f32.safetensors")["p40.generated"].tolist()
