# SPDX-License-Identifier: Apache-2.0
"""The golden test fails when something is wrong: one altered tensor, number or rule at a time.

A sound model is within 1e-6 of the golden f32 logits and the test's tolerance is 1e-5; everything here must be beyond 1e-4.
"""

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import altered_checkpoint, error, load, with_own_mix, zero
from driving import TINY
from torch import Tensor, nn

from modeling_deepseek_v41.checkpoint.spec import expected_tensors, is_vision
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.projections import Projected
from modeling_deepseek_v41.verify import GoldenSet

VISIBLE = 1e-4


def used_expert() -> int:
    """An expert that many tokens of the probed prompt choose in layer 0."""
    layers = GoldenSet(TINY).tensors(TINY / "layers_p40_f32.safetensors")
    return int(layers["prefill.layers.0.gate_indices"].flatten().bincount().argmax())


def kinds() -> dict[str, str]:
    """Every kind of text tensor of the backbone and one tensor of it: layer numbers do not make a kind."""
    expert = used_expert()
    found: dict[str, str] = {}
    for name in expected_tensors(load_config(TINY / "ckpt")):
        if is_vision(name) or name.startswith("mtp.") or re.search(rf"\.experts\.(?!{expert}\.)", name):
            continue
        found.setdefault(re.sub(r"\.\d+\.", ".*.", name), name)
    return found


KINDS = kinds()


def test_the_sound_model_is_within_1e_6(folder: Path, golden: GoldenSet) -> None:
    assert error(load(folder), golden) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_zeroed_tensor_shows(kind: str, folder: Path, golden: GoldenSet, tmp_path: Path) -> None:
    broken = altered_checkpoint(folder, tmp_path / "broken", {KINDS[kind]: zero})
    assert error(load(broken), golden) > VISIBLE


def double(at: tuple[int, int]) -> Callable[[Tensor], None]:
    """Adds 1 to one scale byte: twice the value."""

    def change(scale: Tensor) -> None:
        scale.view(torch.uint8)[at] += 1

    return change


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("layers.3.attn.wq_a.scale", (0, 1)),
        ("layers.0.attn.wkv.scale", (3, 2)),
        ("layers.7.attn.wo_b.scale", (1, 4)),
        ("layers.5.ffn.shared_experts.w2.scale", (2, 0)),
        (f"layers.0.ffn.experts.{used_expert()}.w1.scale", (17, 3)),
        (f"layers.0.ffn.experts.{used_expert()}.w2.scale", (100, 1)),
        ("layers.1.engram.wkv.scale", (19, 5)),
    ],
)
def test_one_flipped_scale_shows(name: str, at: tuple[int, int], folder: Path, golden: GoldenSet, tmp_path: Path) -> None:
    broken = altered_checkpoint(folder, tmp_path / "broken", {name: double(at)})
    assert error(load(broken), golden) > VISIBLE


CONFIGS: dict[str, dict[str, Any]] = {
    "a window one shorter": {"sliding_window": 15},
    "a window one longer": {"sliding_window": 17},
    "the plain layers' rotary base": {"rope_theta": 160000},
    "the compressed layers' rotary base": {"compress_rope_theta": 10000},
    "no YaRN": {"rope_scaling": None},
    "one Sinkhorn round less": {"hc_sinkhorn_iters": 2},
    "no candidates": {"candidate_source_layer_id": -1},
    "one candidate block less": {"candidate_topk_blocks": 3},
    "candidate blocks of another size": {"candidate_block_size": 5},
    "candidates of a later source": {"candidate_source_layer_id": 6},
    "one selected group less": {"index_topk": 7},
    "one selected group more": {"index_topk": 9},
    "no clamp in the experts": {"swiglu_limit": 0.0},
    "another clamp": {"swiglu_limit": 10.0},
    "routing weights as they are": {"norm_topk_prob": False},
    "no routing factor": {"routed_scaling_factor": 1.0},
    "one expert less": {"num_experts_per_tok": 2},
    "norms with a usual epsilon": {"rms_norm_eps": 1e-3},
    "an epsilon of the mixes": {"hc_eps": 1e-3},
    "the engram's pad id": {"engram_pad_token_id": 9},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_number_shows(name: str, folder: Path, golden: GoldenSet, tmp_path: Path) -> None:
    broken = altered_checkpoint(folder, tmp_path / "broken", **CONFIGS[name])
    assert error(load(broken), golden) > VISIBLE


def test_a_dropped_sink_shows(folder: Path, golden: GoldenSet, tmp_path: Path) -> None:
    dropped = {f"layers.{layer}.attn.attn_sink": lambda sink: sink.fill_(-1e30) for layer in range(8)}
    assert error(load(altered_checkpoint(folder, tmp_path / "broken", dropped)), golden) > VISIBLE


def test_exchanged_engram_tables_show(folder: Path, golden: GoldenSet, tmp_path: Path) -> None:
    def roll(table: Tensor) -> None:
        table.view(torch.uint8).copy_(table.view(torch.uint8).roll(1, 0))

    broken = altered_checkpoint(folder, tmp_path / "broken", {"layers.1.engram.embed.weight": roll})
    assert error(load(broken), golden) > VISIBLE


def transposed_comb(model: DeepseekV41Model) -> None:
    for layer in model.layers:
        for mixes in (layer.hc_attn, layer.hc_ffn):
            mixes.register_forward_hook(lambda module, args, out: (*out[:3], out[3].mT.contiguous()))


def undelayed_mix(model: DeepseekV41Model) -> None:
    """Attention collapses with its own layer's pre instead of the previous sublayer's."""
    for layer in model.layers:
        layer.register_forward_pre_hook(with_own_mix)


def post_of_one(model: DeepseekV41Model) -> None:
    for layer in model.layers:
        layer.hc_ffn.register_forward_hook(lambda module, args, out: (*out[:2], out[2].clamp(max=1), out[3]))


def normalised_queries(model: DeepseekV41Model) -> None:
    """A norm per head, as the model's predecessor has."""

    numerics = model.numerics

    def normalised(*args: Any) -> Projected:
        found = numerics.ops.query_projection(*args)
        heads = found.q.unflatten(-1, (model.config.num_attention_heads, -1))
        return found._replace(q=(heads * heads.square().mean(-1, keepdim=True).rsqrt()).flatten(-2))

    ops = dataclasses.replace(numerics.ops, query_projection=normalised)
    for layer in model.layers:
        layer.attn.numerics = dataclasses.replace(numerics, ops=ops)


def newest_block_not_pinned(model: DeepseekV41Model) -> None:
    """The candidates without the block of the query's newest group."""

    def unpin(module: nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        call = args[4]
        newest = (call.reach // module.ratio - 1) // module.config.candidate_block_size
        return out[0], out[1].scatter(-1, newest.clamp_min(0).unsqueeze(-1), False)

    model.layers[model.config.candidate_source_layer_id].attn.indexer.register_forward_hook(unpin)


def highest_positions_win(model: DeepseekV41Model) -> None:
    """Selection takes the newest groups whatever their score."""

    def newest(module: nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        seen = args[4].reach.unsqueeze(-1) // module.ratio
        idxs = seen - module.config.index_topk + torch.arange(module.config.index_topk)
        return idxs.where(idxs >= 0, -1).sort(-1).values, out[1]

    model.layers[4].attn.indexer.register_forward_hook(newest)


def stale_index_keys(model: DeepseekV41Model) -> None:
    """What the release ships: on a step that completes no group, an owner scores against the keys published last."""
    owners = [layer for layer in model.config.kv_source_layer_ids if model.config.compress_ratios[layer] > 1]
    last = f"ikey.{model.config.kv_source_layer_ids[-1]}"

    def published_last(module: nn.Module, args: Any) -> Any:
        call, state = args[4:6]
        if call.positions.shape[1] > 1 or (int(call.start[0]) + 1) % module.ratio == 0:
            return None
        name = f"ikey.{module.source}"
        groups = state[name].shape[-1]
        stale = copy.copy(state)
        stale.tensors = dict(state.tensors) | {name: state[last][..., :groups]}
        return *args[:5], stale

    for layer in owners:
        model.layers[layer].attn.indexer.register_forward_pre_hook(published_last)


RULES = [
    transposed_comb, undelayed_mix, post_of_one, normalised_queries, newest_block_not_pinned, highest_positions_win,
    stale_index_keys,
]  # fmt: skip


@pytest.mark.parametrize("break_rule", RULES)
def test_a_wrong_rule_shows(break_rule: Callable[[DeepseekV41Model], None], folder: Path, golden: GoldenSet) -> None:
    model = load(folder)
    break_rule(model)
    assert error(model, golden) > VISIBLE
