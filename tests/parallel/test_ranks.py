# SPDX-License-Identifier: Apache-2.0
"""Many ranks give what one gives: logits to the order of sums, tokens and drafts exactly, and every rank the same bits."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Run, golden_logits, rank_results, results
from safetensors.torch import load_file
from test_layout import TRN2
from torch import Tensor

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.layout import make_layout
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.sharding import shard_checkpoint
from modeling_deepseek_v41.verify import GoldenSet
from modeling_deepseek_v41.verify.logits import check_logits

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a"
TINY = GOLDEN / "ckpt"
FOUR = ((3, 5, 8, 100, 7), (9,), tuple(range(40, 57)), tuple(range(100, 140)))
"""Prompts of 1 to 40 tokens: windows are left, groups complete, and more groups are seen than are selected."""

PERMUTED = {2: [[0, 5], [1, 4], [2, 7], [3, 6]], 4: [[0, 2, 5, 7], [1, 3, 4, 6]]}
SIXTEEN = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]


@functools.cache
def single(run: Run) -> dict[str, Any]:
    return results(run)


WORST = {"fp32_no_qdq": 1e-5, "fp32": 1e-2}
"""The relative error of a row of logits. With QDQ a sum in another order may round a cached value the other way: then 1e-4 to
1e-2 from there on (the golden set's README), else 1e-6."""


def check(ranks: list[Any], runs: list[Run], options: list[dict[str, Any]]) -> None:
    """Compares what ``rank_results`` gave in every rank with one process, and with each other to the bit."""
    for place, some in enumerate(options):
        for number, run in enumerate(runs):
            expected, found = single(run), [rank[place][number] for rank in ranks]
            where = f"{some}, {run.numerics}, batch {len(run.prompts)}"
            error = (found[0]["logits"] - expected["logits"]).abs().amax(-1) / expected["logits"].abs().amax(-1)
            print(f"{where}: relative error {error.max():.1e}, median {error.median():.1e}, exchanges {found[0]['counts']}")
            assert found[0]["logits"].shape == expected["logits"].shape, where
            assert error.max() < WORST[run.numerics] and error.median() < 1e-5, where
            assert torch.equal(found[0]["tokens"], expected["tokens"]), where
            for kind in ("drafted", "drafts"):
                for got, want in zip(found[0][kind], expected[kind], strict=True):
                    assert torch.equal(got, want), (where, kind)
            for other in found[1:]:
                assert same_bits(found[0], other), where


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    pairs = [(a["logits"], b["logits"])]
    for kind in ("drafted", "drafts", "draft logits"):
        pairs += zip(a[kind], b[kind], strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A random checkpoint like the golden one, with some numbers changed."""
    content = json.loads((TINY / "config.json").read_text())
    content["text_config"] |= changes
    content.pop("vision_config")
    write_checkpoint(content, folder / "ckpt", seed=4)
    return folder / "ckpt"


def test_two_ranks() -> None:
    runs, options = [Run(TINY, "fp32_no_qdq", FOUR[:2], steps=2, draft_steps=1)], [{}]
    check(run_ranks(2, rank_results, runs, options), runs, options)


def test_four_ranks() -> None:
    """Two attention groups that are no neighbours, experts split both ways, wo_b over the world; and one group of four."""
    runs = [Run(TINY, prompts=FOUR[2:], steps=2, draft_steps=1)]
    both = {"attn_tp_degree": 2, "mesh": [[0, 3], [1, 2]], "moe_ep_degree": 2, "dspark_moe_ep_degree": 2}
    options: list[dict[str, Any]] = [both | {"o_proj_reduce": "world"}, {}]
    ranks = run_ranks(4, rank_results, runs, options)
    check(ranks, runs, options)
    sources, layers = 3, 8
    assert ranks[0][1][0]["counts"]["plain step"] == {
        "world sum": layers + 1, "world gather": 1, "group sum": layers, "group gather": sources,
    }  # fmt: skip
    assert ranks[0][0][0]["counts"]["plain step"] == {
        "world sum": 2 * layers + 1, "world gather": 1, "group gather": sources,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_layouts(world_size: int) -> None:
    """Batch 1 and 4; contiguous and permuted groups; experts by id, and by id and columns; both ways to reduce wo_b."""
    options: list[dict[str, Any]] = [{}, {"o_proj_reduce": "world"}]
    if world_size == 16:
        options = [{"dspark_moe_ep_degree": 8, "mesh": mesh} for mesh in ("contiguous", SIXTEEN)]
        options += [some | {"o_proj_reduce": "world"} for some in options]
    if world_size == 8:
        for degree, mesh in PERMUTED.items():
            options += [{"attn_tp_degree": degree, "moe_ep_degree": 4, "dspark_moe_ep_degree": 4}]
            options += [{"attn_tp_degree": degree, "mesh": mesh, "o_proj_reduce": "world"}]
    runs = [Run(TINY, prompts=FOUR), Run(TINY, "fp32_no_qdq", FOUR), Run(TINY, prompts=FOUR[3:])]
    check(run_ranks(world_size, rank_results, runs, options, seconds=1500), runs, options)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (8, {"attn_tp_degree": 4, "mesh": PERMUTED[4]})])
@pytest.mark.parametrize(("mode", "numerics"), [("f32", "fp32"), ("f32_noq", "fp32_no_qdq")])
def test_the_golden_logits(world_size: int, options: dict[str, Any], mode: str, numerics: str) -> None:
    """1e-5 on every row of the reference, whose tokens are fed; without QDQ on the prompts that have no tie."""
    golden = load_file(GOLDEN / f"golden_{mode}.safetensors")
    prompts = ["p17", "p100"] if mode == "f32_noq" else ["p1", "p5", "p17", "p40", "p100"]
    for (found,) in run_ranks(world_size, golden_logits, GOLDEN, numerics, mode, prompts, [options], seconds=1500):
        for prompt, logits in zip(prompts, found, strict=True):
            expected = golden[f"{prompt}.logits"]
            error = (logits - expected).abs().amax(-1) / expected.abs().amax(-1)
            print(f"{world_size} ranks, {mode}, {prompt}: {error.max():.1e}")
            assert error.max() < 1e-5, prompt


def test_the_golden_logits_from_rank_files(tmp_path: Path) -> None:
    """Two ranks that read the files made for them, and nothing else."""
    shard_checkpoint(TINY, tmp_path, make_layout(load_config(TINY), 2), "fp32", progress=False)
    expected = load_file(GOLDEN / "golden_f32.safetensors")["p17.logits"]
    for ((logits,),) in run_ranks(2, golden_logits, GOLDEN, "fp32", "f32", ["p17"], [{}], tmp_path):
        assert ((logits - expected).abs().amax(-1) / expected.abs().amax(-1)).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_release_numerics(kernels: str) -> None:
    """Greedy text with and without drafts is the same, all ranks have the same bits; where attention is not split, and experts
    are whole, so has one process."""
    runs = [Run(TINY, "release", FOUR, kernels=kernels), Run(TINY, "release", FOUR, kernels=kernels, experts="fp4_bytes")]
    options = [{"attn_tp_degree": 1}, {"attn_tp_degree": 2, "mesh": [[0, 3], [1, 2]]}, {"moe_ep_degree": 2}]
    for some, found in zip(options, zip(*run_ranks(4, rank_results, runs, options), strict=True), strict=True):
        for run, ranks in zip(runs, zip(*found, strict=True), strict=True):
            assert all(same_bits(ranks[0], other) for other in ranks[1:])
            assert speculation_is_greedy(ranks[0])
            if some == {"attn_tp_degree": 1}:
                assert same_bits(ranks[0], single(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"attn_tp_degree": 2, "mesh": [[0, 3], [1, 2]]}, {"moe_ep_degree": 2, "dspark_moe_ep_degree": 2}]
)
def test_release_ids_of_the_golden_set(options: dict[str, Any]) -> None:
    """The reference's ids wherever its margin is above the noise between two legal orders of its own sums (4 to 20 %)."""
    lengths, model = (5, 17, 40), load_model(TINY, "release", kernels="torch", progress=False)
    prompts = [prompt for prompt in GoldenSet(GOLDEN).prompts("ref", model.config) if prompt.length in lengths]
    found, *others = run_ranks(4, golden_logits, GOLDEN, "release", "ref", [f"p{length}" for length in lengths], [options])
    for prompt, logits in zip(prompts, found[0], strict=True):
        result = check_logits(model, prompt, "ref", logits)
        print(f"{options}, p{prompt.length}: {result.ids_equal} of {result.counted} ids, relative error {result.error_max:.1e}")
        assert result.ok, result
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other[0], strict=True))


def speculation_is_greedy(found: dict[str, Any]) -> bool:
    """Whether the drafted steps of every row begin as its plain steps go on."""
    for row, plain in enumerate(found["tokens"]):
        drafted = torch.cat([step[row][step[row] >= 0] for step in found["drafted"]])
        count = min(drafted.numel(), plain.numel() - 1)
        if drafted[:count].tolist() != plain[1 : count + 1].tolist():
            return False
    return True


@pytest.mark.slow
def test_compiled_kernels_and_formats_of_experts() -> None:
    runs = [Run(TINY, prompts=FOUR, kernels="numba", experts=kind) for kind in ("bf16", "fp4_bytes", "fp8_exact")]
    options = [{}, {"attn_tp_degree": 2, "moe_ep_degree": 2, "dspark_moe_ep_degree": 2}]
    check(run_ranks(4, rank_results, runs, options), runs, options)


@pytest.mark.slow
def test_a_vocabulary_that_needs_padding(tmp_path: Path) -> None:
    """515 tokens: 129 per rank on 4 with one left over, 65 on 8; columns that stand for no token never come out."""
    runs = [Run(checkpoint(tmp_path, vocab_size=515), "fp32_no_qdq", FOUR)]
    check(run_ranks(4, rank_results, runs, [{}]), runs, [{}])
    check(run_ranks(8, rank_results, runs, [{}]), runs, [{}])


@pytest.mark.slow
def test_wide_experts_split_eight_ways(tmp_path: Path) -> None:
    """256 columns: the shared expert in 8 parts, routed ones by id and columns as 8 x 1, 4 x 2, 2 x 4 and 1 x 8."""
    runs = [Run(checkpoint(tmp_path, moe_intermediate_size=256), "fp32_no_qdq", FOUR)]
    runs.append(dataclasses.replace(runs[0], experts="fp4_bytes"))
    options = [{"moe_ep_degree": degree, "dspark_moe_ep_degree": 8 // degree} for degree in (8, 4, 2, 1)]
    check(run_ranks(8, rank_results, runs, options, seconds=900), runs, options)


@pytest.mark.slow
def test_sixty_four_ranks(tmp_path: Path) -> None:
    """As the release on a trn2: 8 attention groups, one of 64 routed and one of 64 drafter experts per rank."""
    folder = checkpoint(tmp_path, n_routed_experts=64, dspark_n_routed_experts=64)
    runs = [Run(folder, prompts=(FOUR[2],), draft_steps=4)]
    options = [{"mesh": TRN2}, {"mesh": TRN2, "o_proj_reduce": "world"}]
    check(run_ranks(64, rank_results, runs, options, seconds=1500), runs, options)


def fails_in_one() -> Tensor:
    if torch.distributed.get_rank() == 1:
        raise ValueError("on purpose")
    return torch.zeros(1)


def waits_for_ever() -> None:
    if torch.distributed.get_rank() == 1:
        torch.distributed.barrier()


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed: .*ValueError: on purpose"):
        run_ranks(2, fails_in_one)


def test_a_rank_that_hangs_is_ended() -> None:
    with pytest.raises(RuntimeError, match=r"did not end in time|Timed out|rank \d failed"):
        run_ranks(2, waits_for_ever, seconds=20)
