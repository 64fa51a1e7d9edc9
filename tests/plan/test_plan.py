# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: the release's figures at 64 ranks, and the tracer against what is known of small models."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from paper import PaperCheckpoint
from torch.utils.flop_counter import FlopCounterMode

from modeling_deepseek_v41.checkpoint.rank import RankCheckpoint
from modeling_deepseek_v41.checkpoint.spec import is_vision
from modeling_deepseek_v41.cli import main
from modeling_deepseek_v41.config import ModelConfig, config_from_dict, load_config
from modeling_deepseek_v41.layout import make_layout
from modeling_deepseek_v41.loading import build_model, load_weights
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.numerics import numerics_by_name
from modeling_deepseek_v41.parallel import unconnected
from modeling_deepseek_v41.plan import Plan, Settings, make_plan
from modeling_deepseek_v41.plan.accounting import account
from modeling_deepseek_v41.plan.check import DSPARK, PLAIN, PROMPT, Stage, rank_memory
from modeling_deepseek_v41.plan.costs import Product, expert_flops  # noqa: F401 (registers the formula)
from modeling_deepseek_v41.plan.predict import busiest_share, engine_seconds
from modeling_deepseek_v41.shard_plan import ShardPlan
from modeling_deepseek_v41.state import allocate

DATA = Path(__file__).resolve().parents[1] / "data"
RELEASE, TINY = DATA / "release_config.json", DATA / "golden" / "tiny_a" / "ckpt"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(RELEASE)


@pytest.fixture(scope="module")
def release(config: ModelConfig) -> Plan:
    """64 ranks, 8k context, batch 1."""
    return make_plan(config, Settings(buckets=(16,)))


def exchanges(stage: Stage) -> dict[str, int]:
    return {f"{group} {kind}": entry.count for (group, kind), entry in stage.costs.exchanges.items()}


def test_memory_of_the_release(config: ModelConfig, release: Plan) -> None:
    assert release.refusal is None
    assert release.nbytes <= 16 * 2**30
    assert sum(rank_memory(config, Settings(expert_weight_format="fp4_bytes")).values()) <= 11.5 * 2**30
    w13, w2, exceptions = 6 * 4608 * 5120, 6 * 5120 * 2304, (108 * 5120 + 120 * 2304) * 2 + (108 + 120) * 4
    assert release.memory["experts"] == 40 * (w13 + w2 + 2 * 6 * (4608 + 5120) + exceptions)
    rows = [-(-count // 64) for count in config.engram_num_embeddings]
    assert release.memory["engram tables"] == sum(rows) * (256 + 8)
    assert release.memory["router"] == 40 * (384 * 5120 * 2 + 384 * 4)
    assert release.memory["embedding/head"] == 2 * 2020 * 5120 * 2


def test_bf16_experts_are_refused(config: ModelConfig) -> None:
    plan = make_plan(config, Settings(expert_weight_format="bf16"))
    assert plan.refusal is not None and not plan.stages
    for words in ("bf16 on world_size 64", "needs 23.63 GB, 17.41 of them for routed experts", "has 22.00"):
        assert words in plan.refusal


def test_all_ranks_need_the_same(config: ModelConfig) -> None:
    layout = make_layout(config, 64)

    def shapes(rank: int) -> dict[str, tuple]:
        model = build_model(
            config, numerics_by_name("release"), 8192, "fp8_exact", drafter=True, parallel=unconnected(layout, rank)
        )
        return {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}

    assert shapes(0) == shapes(63)


@pytest.mark.parametrize("options", [{}, {"moe_ep_degree": 8, "dspark_moe_ep_degree": 8}, {"o_proj_reduce": "world"}])
def test_every_tensor_of_the_release_is_accounted_for(config: ModelConfig, options: dict) -> None:
    found = account(config, make_layout(config, 64, **options))
    assert (found.tensors, found.nbytes) == (95_819, 509_315_486_040)
    assert (found.whole, found.unread) == (95_776, 43)


def test_loading_reads_what_the_rank_is_said_to_hold(config: ModelConfig) -> None:
    """The loading code itself, without data; a part of another shape than its module has would be refused."""
    parallel = unconnected(make_layout(config, 64), 37)
    paper, plan = PaperCheckpoint(config), ShardPlan(config, parallel.layout, 37)
    model = build_model(config, numerics_by_name("release"), 512, "fp4_bytes", drafter=True, parallel=parallel)
    with torch.device("meta"):
        load_weights(model, RankCheckpoint(paper, plan))  # type: ignore[arg-type]
    assert paper.read == {name for name in paper.tensors if plan.holds(name) and not is_vision(name)}


def test_exchanges_of_the_release(release: Plan) -> None:
    prompt, plain, dspark = release.stages
    assert [stage.name for stage in release.stages] == [PROMPT, PLAIN, DSPARK]
    layers = {"world sum": 41, "attention sum": 40, "attention gather": 8}
    assert exchanges(plain) == layers | {"world gather": 2}, "engram columns, logits"
    assert exchanges(prompt) == layers | {"world gather": 3}, "and main_proj"
    assert exchanges(dspark) == {"world sum": 45, "world gather": 9, "attention sum": 43, "attention gather": 8}
    assert plain.costs.exchanges["attention", "sum"].nbytes == 40 * 5120 * 4
    assert plain.costs.exchanges["world", "sum"].nbytes == 4 * (41 * 5120 + 2 * 24 * 256)


@pytest.mark.slow
def test_exchanges_where_wo_b_is_reduced_over_the_world(config: ModelConfig) -> None:
    plan = make_plan(config, Settings(buckets=(16,), o_proj_reduce="world", moe_ep_degree=8))
    assert exchanges(plan.stages[1]) == {"world sum": 81, "world gather": 2, "attention gather": 8}
    experts = plan.stages[1].costs.experts[0]
    assert (experts.local, experts.products[0]) == (48, Product(48, 1, 5120, 2 * 288))


def test_reads_of_the_release(config: ModelConfig, release: Plan) -> None:
    """A decode step reads every weight once, and of the caches what its rows see: the index keys' eighth."""
    prompt, plain, dspark = release.stages
    whole = (
        "experts", "attention", "shared experts", "router", "hyper-connections", "norms", "compressor+indexer", "engram other",
    )  # fmt: skip
    for stage in release.stages:
        for group in whole:
            assert stage.costs.reads[group] == release.memory[group], (stage.name, group)
    assert plain.costs.reads["drafter experts"] == 0
    assert dspark.costs.reads["drafter experts"] == release.memory["drafter experts"]
    assert plain.costs.reads["compressed KV"] == 38 * 512 * 512 * 2
    assert dspark.costs.reads["compressed KV"] == 6 * plain.costs.reads["compressed KV"]
    groups = sum(8192 // config.compress_ratios[layer] for layer in config.index_source_layer_ids)
    assert plain.costs.reads["index keys"] == groups * 128 * 2 // 8
    assert plain.costs.writes["window KV"] == 40 * 512 * 2


def test_products_of_the_release(release: Plan) -> None:
    prompt, plain, dspark = release.stages
    expert = 6 * 5120 * 2304
    assert plain.costs.expert_flops == 40 * 6 * expert
    assert dspark.costs.expert_flops == (6 * 40 * 6 + 5 * 3 * 2) * expert
    assert prompt.costs.expert_flops == 16 * plain.costs.expert_flops


def test_predictions(release: Plan) -> None:
    """Figures of docs/kernels.md: the busiest rank's 2.6 of 6 experts for 6 tokens, 28.8 us of an engine per expert."""
    assert 6 * busiest_share(6, 6, 6, 64) == pytest.approx(2.6, abs=0.1)
    assert 48 * busiest_share(6, 6, 48, 8) == pytest.approx(7.3, abs=0.2)
    assert busiest_share(512, 6, 6, 64) == 1.0
    expert = engine_seconds(Product(1, 8, 5120, 4608)) + engine_seconds(Product(1, 8, 2304, 5120))
    assert expert == pytest.approx(28.8e-6, rel=0.01)
    for stage in release.stages:
        times = stage.prediction
        assert times.memory_fast <= times.memory_slow and times.fast < times.slow
        assert stage.is_decode == (stage.name != PROMPT)
    assert 5e-3 < release.stages[1].prediction.fast < 15e-3


def tiny(**changes: object) -> ModelConfig:
    content = json.loads((TINY / "config.json").read_text())
    content["text_config"] |= changes
    return config_from_dict(content)


def test_exchanges_are_those_of_real_ranks() -> None:
    """As counted by processes in tests/parallel, and the gather of the logits, which is not part of their forward."""
    settings = Settings(4, 2, 2, 2, "world", seq_len=128, buckets=(16,))
    plain = make_plan(tiny(), settings).stages[1]
    assert exchanges(plain) == {"world sum": 17, "world gather": 2, "attention gather": 3}


def test_products_are_those_that_torch_counts() -> None:
    config = tiny()
    plain = make_plan(config, Settings(1, seq_len=128, batch=2, buckets=(16,), expert_weight_format="bf16")).stages[1]
    with torch.device("meta"), torch.no_grad():
        model = DeepseekV41Model(config, numerics_by_name("release"), 128, exact_tokens=0)
        zeros, state = torch.zeros(2, dtype=torch.int64), allocate(model.state_spec(2), "meta")
        with FlopCounterMode(display=False) as counter:
            hidden, *_ = model(zeros.view(2, 1), zeros, zeros, zeros, zeros[:1], *state, read_len=128)
            model.logits(hidden)
    assert plain.costs.flops + plain.costs.expert_flops == counter.get_total_flops()
    assert not plain.costs.exchanges


def test_without_drafter_and_engram() -> None:
    ratios = json.loads((TINY / "config.json").read_text())["text_config"]["compress_ratios"][:8]
    changes = {"num_nextn_predict_layers": 0, "compress_ratios": ratios, "engram_layer_ids": [], "engram_num_embeddings": []}
    plan = make_plan(tiny(**changes), Settings(2, seq_len=64, buckets=(16, 32)))
    assert [(stage.name, stage.rows, stage.read_len) for stage in plan.stages] == [
        (PROMPT, 16, 16), (PROMPT, 32, 64), (PLAIN, 1, 64),
    ]  # fmt: skip
    assert "drafter" not in plan.memory and "engram tables" not in plan.memory


COMMAND = ["plan", "--config", str(TINY), "--world-size", "4", "--seq-len", "128", "--buckets", "16"]


def test_command(capsys: pytest.CaptureFixture) -> None:
    assert main(COMMAND) == 0
    out, _ = capsys.readouterr()
    for words in ("4 ranks: attention groups of 4", "fp8_exact", "context encoding: 1 x 16 tokens", "DSpark step: 1 x", "GFLOP",
                  "nothing was measured"):  # fmt: skip
        assert words in out
    assert "are cut to that" not in out
    assert main([*COMMAND, "512"]) == 0
    assert "--buckets: 512 of more than --seq-len 128 positions are cut to that" in capsys.readouterr().out
    assert main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["fits"] and found["memory"]["bytes"] == sum(found["memory"]["groups"].values())
    assert [stage["host_syncs"] for stage in found["stages"]] == [0, 0, 0]
    assert found["stages"][0]["predicted"]["step_seconds"] is None
    assert found["checkpoint"]["whole"] + found["checkpoint"]["unread"] == found["checkpoint"]["tensors"]


def test_command_says_what_does_not_fit(capsys: pytest.CaptureFixture) -> None:
    release = ["plan", "--config", str(RELEASE)]
    assert main([*release, "--world-size", "8", "--expert-weight-format", "bf16"]) == 1
    assert "does not fit: expert_weight_format bf16 on world_size 8: a rank needs" in capsys.readouterr().err
    for options, words in [
        (["--attn-tp-degree", "5"], "attn_tp_degree: 5 does not divide world_size, which is 64"),
        (["--moe-ep-degree", "7"], "moe_ep_degree: 7 does not divide world_size"),
        (["--seq-len", "0"], "seq_len: expected 1 to max_position_embeddings 1048576"),
        (["--batch", "0"], "batch: expected an integer of 1 to 1048576, found 0"),
        (["--batch", str(10**21)], f"batch: expected an integer of 1 to 1048576, found {10**21}"),
        (["--buckets", "0"], "prefill_buckets: expected a list of token counts above 0"),
    ]:
        assert main([*release, *options]) == 2
        assert words in capsys.readouterr().err
    assert main(["plan", "--config", "/nowhere"]) == 2
    assert "/nowhere: cannot be read" in capsys.readouterr().err


def test_settings_are_checked_before_anything_is_built(config: ModelConfig) -> None:
    settings = dataclasses.replace(Settings(), expert_weight_format="int4")
    with pytest.raises(ValueError, match="expert_weight_format: expected one of bf16, fp4_bytes, fp8_exact, found 'int4'"):
        make_plan(config, settings)
