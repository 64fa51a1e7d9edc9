# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: router, routed experts and the shared expert (docs/model.md, section 7)."""

import torch
from torch import Tensor, nn

from .checkpoint.rank import Source
from .config import ModelConfig
from .expert_bank import ExpertBank, ExpertStorage
from .experts import Bank, as_bank, local_experts
from .linear import fill, frozen
from .numerics import Arithmetic
from .parallel import Parallel, own_rows, place_of
from .rows import by_rows
from .topk import top_positions


class Router(nn.Module):
    """The gate of one layer, with the shared expert beside it; logits, scores and routing weights are fp32."""

    def __init__(self, config: ModelConfig, is_drafter: bool, arithmetic: Arithmetic):
        super().__init__()
        experts, self.top_k = config.experts(is_drafter)
        self.normalises = config.norm_topk_prob and self.top_k > 1
        self.factor, self.arithmetic = config.routed_scaling_factor, arithmetic
        self.weight = frozen(experts, config.hidden_size, dtype=arithmetic.weight_dtype)
        self.bias = frozen(experts)

    def forward(self, x: Tensor, shared: Bank, limit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``route_and_share`` of x [B, T, d] fp32 and the layer's shared expert, whose clamp is ``limit``."""
        options = self.top_k, self.normalises, self.factor
        return self.arithmetic.ops.route_and_share(x, self.weight, self.bias, *options, shared, limit, self.arithmetic)


def route_and_share(
    x: Tensor, weight: Tensor, bias: Tensor, k: int, normalises: bool, factor: float, shared: Bank, limit: float,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What every rank does with all rows: ids and routing weights [B, T, k] of ``route``, activation(x) [B, T, d], which the
    experts take, and the shared expert's result of it [B, T, d].

    x [B, T, d] fp32, not yet through the activation QDQ; the gate's weight [experts, d] fp32 or bf16, its bias [experts].
    """
    ops, quantised = arithmetic.ops, arithmetic.activation(x)
    ids, weights = ops.route(ops.linear(x, weight, False, arithmetic), bias, k, normalises, factor, arithmetic)
    return ids, weights, quantised, ops.shared_expert(quantised, shared, limit, arithmetic)


def route(
    logits: Tensor, bias: Tensor, k: int, normalises: bool, factor: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """The k experts [B, T, k] int64 of the highest score + ``bias``, best first, and their weights: the scores without the
    bias, divided by their sum where ``normalises``, times ``factor``; logits [B, T, experts] fp32."""
    scores = by_rows(sqrt_softplus, arithmetic.exact_tokens, logits)
    ids = top_positions(scores + bias, k)
    weights = scores.gather(-1, ids)
    if normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * factor


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) in fp32 without over- or underflow for x in +-200; below -16 it is exp(x / 2)."""
    soft = x.clamp_min(0) + x.abs().neg_().exp_().log1p_()
    return torch.where(x < -16.0, (x * 0.5).exp_(), soft.sqrt_())


class SharedExpert(ExpertBank):
    """The expert that every token uses, stored in fp8: the same clamp, no routing weight."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, parallel: Parallel):
        parts = parallel.layout.shared_tp_degree
        inter, share = config.moe_intermediate_size // parts, parts / parallel.layout.world_size
        super().__init__(1, config.hidden_size, inter, arithmetic, ExpertStorage(), parts == 1, share)

    @property
    def bank(self) -> Bank:
        """Its weights as operations take them."""
        return as_bank(self.tensors, self.whole, self.share)

    def load(self, checkpoint: Source, name: str) -> None:
        """Reads ``name``.{w1,w2,w3}.{weight,scale}."""
        d, inter = self.w2.shape[1:]
        w1, w2, w3 = (
            checkpoint.linear(f"{name}.{part}", 0, rows).to(self.w2.dtype)
            for part, rows in (("w1", inter), ("w2", d), ("w3", inter))
        )
        fill(self, "w13", torch.cat([w1, w3]).unsqueeze(0))
        fill(self, "w2", w2.unsqueeze(0))


class MoE(nn.Module):
    """Routed experts summed in fp32, the shared expert added in fp32, one rounding.

    Every rank routes all tokens and computes what its own experts, and its part of the shared one, add to them.
    """

    def __init__(
        self, config: ModelConfig, arithmetic: Arithmetic, is_drafter: bool, storage: ExpertStorage, parallel: Parallel
    ):
        super().__init__()
        self.arithmetic, self.limit, self.world = arithmetic, config.swiglu_limit, parallel.world
        experts, _ = config.experts(is_drafter)
        by_id, by_columns = parallel.layout.expert_degrees(is_drafter)
        self.local, inter = experts // by_id, config.moe_intermediate_size // by_columns
        self.split = parallel.layout.split("dspark_experts" if is_drafter else "experts")
        self.gate = Router(config, is_drafter, arithmetic)
        self.experts = ExpertBank(self.local, config.hidden_size, inter, arithmetic, storage, by_columns == 1)
        self.shared_experts = SharedExpert(config, arithmetic, parallel)

    def forward(self, x: Tensor, rank: Tensor) -> Tensor:
        """x = ffn_norm(collapse(streams)) [B, T, d] and this process's rank [1] to the sublayer's output [B, T, d]."""
        ids, weights, quantised, shared = self.gate(x, self.shared_experts.bank, self.limit)
        if self.split.parts > 1:
            own, here = own_rows(ids, place_of(self.split.places, rank), self.local)
            ids = own.masked_fill(~here, self.local)
        y = local_experts(quantised, ids, weights, self.experts, shared, self.limit)
        return self.arithmetic.round(self.world.sum(y))
