# SPDX-License-Identifier: Apache-2.0
"""Which layouts there are, which are refused, and which part of which tensor they give to whom."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_deepseek_v41.checkpoint import Checkpoint, expected_tensors
from modeling_deepseek_v41.checkpoint.rank import RankCheckpoint
from modeling_deepseek_v41.config import ModelConfig, config_from_dict, load_config
from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.layout import contiguous_mesh, make_layout
from modeling_deepseek_v41.parallel import join_parts, own_part
from modeling_deepseek_v41.shard_plan import RULES, ShardPlan

DATA = Path(__file__).resolve().parents[1] / "data"
TINY = DATA / "golden" / "tiny_a" / "ckpt"
SPLITS = (
    "world", "attention", "o_proj", "shared", "experts", "expert_columns", "dspark_experts", "dspark_expert_columns",
)  # fmt: skip

TRN2 = [[*range(first, first + 4), *range(first + 12, first + 16)] for first in (0, 16, 32, 48)]
TRN2 = sorted(TRN2 + [list(range(first + 4, first + 12)) for first in (0, 16, 32, 48)])
"""The attention groups that NxD Inference uses on a trn2.48xlarge with 64 logical cores."""


@pytest.fixture
def release() -> ModelConfig:
    return load_config(next(DATA.rglob("release_config.json")))


def tiny(**changes: Any) -> ModelConfig:
    content = json.loads((TINY / "config.json").read_text())
    content["text_config"] |= changes
    return config_from_dict(content)


def test_defaults_of_the_release(release: ModelConfig) -> None:
    layout = make_layout(release, 64)
    assert (layout.attn_tp_degree, layout.moe_ep_degree, layout.dspark_moe_ep_degree) == (8, 64, 64)
    assert (layout.shared_tp_degree, layout.o_proj_reduce) == (8, "group")
    assert layout.mesh == contiguous_mesh(64, 8)
    assert make_layout(release, 64, moe_ep_degree=8).expert_degrees(False) == (8, 8)
    assert make_layout(release, 1).expert_degrees(True) == (1, 1)


def test_the_mesh_of_trn2(release: ModelConfig) -> None:
    layout = make_layout(release, 64, mesh=TRN2)
    assert TRN2[:2] == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert layout == make_layout(release, 64, mesh="trn2")
    assert make_layout(release, 32, mesh="trn2") == make_layout(release, 32)
    places = layout.split("attention").places
    assert [places[rank] for rank in TRN2[0]] == list(range(8))
    assert (places[12], layout.group_numbers[12], layout.group_numbers[4]) == (4, 0, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, "world_size: expected an integer of 1 or more, found 0"),
        ({"world_size": 8, "attn_tp_degree": 3}, "attn_tp_degree: 3 does not divide world_size, which is 8"),
        ({"world_size": 16, "attn_tp_degree": 16}, "attn_tp_degree: 16 does not divide o_groups"),
        ({"world_size": 8, "moe_ep_degree": 3}, "moe_ep_degree: 3 does not divide world_size"),
        ({"world_size": 32, "moe_ep_degree": 32}, "moe_ep_degree: 32 does not divide n_routed_experts"),
        ({"world_size": 8, "moe_ep_degree": 2}, "moe_ep_degree: 2 splits every expert 4 ways, but moe_intermediate_size 64"),
        ({"world_size": 16, "dspark_moe_ep_degree": 16}, "dspark_moe_ep_degree: 16 does not divide dspark_n_routed_experts"),
        ({"world_size": 8, "moe_ep_degree": True}, "moe_ep_degree: expected an integer of 1 or more, found True"),
        ({"world_size": 2, "o_proj_reduce": "all"}, "o_proj_reduce: expected one of group, world, found 'all'"),
        ({"world_size": 2, "mesh": [[0], [1]]}, "mesh: expected groups of 2 ranks in ascending order"),
        ({"world_size": 2, "mesh": [[1, 0]]}, "mesh: expected groups of 2 ranks in ascending order"),
        ({"world_size": 2, "mesh": [[0, 0]]}, "mesh: expected every rank from 0 to 1 once"),
        ({"world_size": 2, "mesh": "ring"}, "mesh: expected one of contiguous, trn2, or groups of ranks, found 'ring'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        make_layout(tiny(), **options)


def test_what_the_configuration_cannot_be_divided_into() -> None:
    with pytest.raises(RequestError, match="attn_tp_degree: 8 leaves 16 columns of wo_b per rank"):
        make_layout(tiny(o_lora_rank=16), 8)
    with pytest.raises(RequestError, match=r"attn_tp_degree: 2 does not divide 512 .* \(candidate_block_size 3"):
        make_layout(tiny(candidate_block_size=3), 2, attn_tp_degree=2)
    with pytest.raises(RequestError, match="o_proj_reduce world: world_size 24 does not divide the 256 columns"):
        make_layout(tiny(n_routed_experts=24, dspark_n_routed_experts=24), 24, o_proj_reduce="world")


@pytest.mark.parametrize("o_proj_reduce", ["group", "world"])
@pytest.mark.parametrize("mesh", ["contiguous", TRN2])
@pytest.mark.parametrize("by_id", [64, 8])
def test_every_part_has_as_many_ranks(release: ModelConfig, o_proj_reduce: str, mesh: Any, by_id: int) -> None:
    layout = make_layout(release, 64, moe_ep_degree=by_id, o_proj_reduce=o_proj_reduce, mesh=mesh)
    for name in SPLITS:
        parts, places = layout.split(name)
        assert sorted(places) == sorted(list(range(parts)) * (64 // parts)), name
    both = zip(layout.split("experts").places, layout.split("expert_columns").places, strict=True)
    assert len(set(both)) == 64


def test_rules_name_one_tensor_each_and_what_is_large(release: ModelConfig) -> None:
    """Nothing above 64 MB is on every rank, no two rules want the same tensor, no rule is without one."""
    specs = expected_tensors(release)
    used = set()
    for name, spec in specs.items():
        matching = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
        assert len(matching) <= 1, name
        assert matching or spec.nbytes <= 64 << 20 or name.endswith("markov_head.embed.weight"), name
        used |= set(matching)
    assert used == set(RULES)


LAYOUTS = [
    {"world_size": 1}, {"world_size": 2}, {"world_size": 4, "attn_tp_degree": 2, "mesh": [[0, 3], [1, 2]]},
    {"world_size": 8, "moe_ep_degree": 4, "dspark_moe_ep_degree": 4}, {"world_size": 16, "dspark_moe_ep_degree": 8},
    {"world_size": 16, "dspark_moe_ep_degree": 8, "o_proj_reduce": "world"},
]  # fmt: skip


@pytest.mark.parametrize("options", LAYOUTS)
def test_the_parts_make_the_whole(options: dict[str, Any]) -> None:
    """Every tensor of the tiny checkpoint, put together from the ranks' parts, each under the rank's own name."""
    config = load_config(TINY)
    layout = make_layout(config, **options)
    with Checkpoint(TINY, config) as checkpoint:
        plans = [ShardPlan(config, layout, rank) for rank in range(layout.world_size)]
        for name, spec in checkpoint.tensors.items():
            if name.startswith(("vision", "aligner", "image")):
                continue
            holders = [rank for rank, plan in enumerate(plans) if plan.holds(name)]
            linear = name.removesuffix(".weight")
            decodes = name.endswith(".weight") and f"{linear}.scale" in checkpoint.tensors and ".experts." not in name
            if name.endswith(".scale") and ".experts." not in name and "engram.embed" not in name:
                continue  # read with its weight
            whole = checkpoint.linear(linear, 0, spec.shape[0]) if decodes else checkpoint.tensor(name)
            found: dict[int, torch.Tensor] = {}
            part = None
            for rank in holders:
                own = own_name(plans[rank], name)
                part = plans[rank].part(name)
                source = RankCheckpoint(checkpoint, plans[rank])
                rows = math.ceil(spec.shape[0] / part.parts) if part and part.dim == 0 else spec.shape[0]
                tensor = source.linear(linear, 0, rows) if decodes else source.tensor(own)
                place = part.place if part else 0
                assert place not in found or equal(found[place], tensor), name
                found[place] = tensor
            assert len(found) == (part.parts if part else 1), name
            joined = torch.cat([bits(found[place]) for place in sorted(found)], part.dim if part else 0)
            assert torch.equal(joined[: whole.shape[0]], bits(whole)), name
            assert not joined[whole.shape[0] :].any(), name


def own_name(plan: ShardPlan, stored: str) -> str:
    """The rank's own name of a tensor that it holds."""
    match = re.search(r"\.experts\.(\d+)\.", stored)
    if match is None:
        return stored
    for number in range(int(match[1]) + 1):
        own = stored.replace(match[0], f".experts.{number}.")
        if plan.stored_name(own) == stored:
            return own
    raise AssertionError(stored)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def test_an_fp8_linear_is_decoded_from_any_row_on() -> None:
    """Parts of 10 rows, while scales belong to blocks of 32."""
    with Checkpoint(TINY) as checkpoint:
        name = "layers.1.engram.wkv"
        whole = checkpoint.linear(name, 0, 640)
        for first in range(0, 640, 10):
            assert torch.equal(checkpoint.linear(name, first, first + 10), whole[first : first + 10])


def test_parts_of_tiles() -> None:
    x = torch.arange(24).view(1, 24)
    parts = [own_part(x, 8, 4, torch.tensor([place])) for place in range(4)]
    assert parts[1].tolist() == [[2, 3, 10, 11, 18, 19]]
    assert torch.equal(join_parts(torch.cat(parts, -1), 8, 4), x)
