# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts over many tokens at once (docs/model.md, section 7), differentiable."""

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.topk import top_positions

from .weights import Weights


def experts(x: Tensor, w: Weights, name: str, config: ModelConfig, is_drafter: bool) -> tuple[Tensor, Tensor]:
    """x [B, T, d] through the experts ``name``: the output [B, T, d] and how many tokens each expert got [E].

    Tokens are sorted by expert, so an expert is three matrix products whatever the number of its tokens.
    """
    count, k = config.experts(is_drafter)
    rows = x.flatten(0, -2)
    score = F.softplus(F.linear(rows, w[f"{name}.gate"])).sqrt()
    chosen = top_positions(score.detach() + w[f"{name}.gate.bias"], k)
    routing = score.gather(-1, chosen)
    if config.norm_topk_prob and k > 1:
        routing = routing / (routing.sum(-1, keepdim=True) + 1e-20)
    order = chosen.flatten().argsort(stable=True)
    load = chosen.flatten().bincount(minlength=count)
    token = order // k
    sizes, limit = load.tolist(), config.swiglu_limit
    weight13 = torch.cat([w[f"{name}.experts.w1"], w[f"{name}.experts.w3"]], 1)
    gate_up = _by_expert(rows[token], weight13, sizes)
    h = _swiglu(gate_up, limit) * (routing.flatten()[order] * config.routed_scaling_factor).unsqueeze(-1)
    shared = f"{name}.shared_experts"
    own = _swiglu(F.linear(rows, torch.cat([w[f"{shared}.w1"], w[f"{shared}.w3"]])), limit)
    out = F.linear(own, w[f"{shared}.w2"]).index_add(0, token, _by_expert(h, w[f"{name}.experts.w2"], sizes))
    return out.view(x.shape), load


def _by_expert(rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """rows [n, k], sorted by expert, times each one's matrix of weight [E, m, k], transposed: [n, m]."""
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(rows.split(sizes), weight.unbind(0), strict=True)])


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
