# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: router, routed experts and the shared expert (docs/model.md, section 7)."""

import torch
from torch import Tensor, nn

from .checkpoint.reader import Checkpoint
from .config import ModelConfig
from .experts import ExpertBank, local_experts
from .formats import decode_fp8
from .linear import fill, frozen
from .numerics import Arithmetic
from .rows import by_rows
from .topk import top_positions


class Router(nn.Module):
    """The gate of one layer; all of it is fp32."""

    def __init__(self, config: ModelConfig, is_drafter: bool, arithmetic: Arithmetic):
        super().__init__()
        experts, self.top_k = config.experts(is_drafter)
        self.normalises = config.norm_topk_prob and self.top_k > 1
        self.factor, self.arithmetic = config.routed_scaling_factor, arithmetic
        self.weight = frozen(experts, config.hidden_size)
        self.bias = frozen(experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, d] to expert ids [B, T, k] int64, best first, and routing weights [B, T, k] fp32."""
        logits = self.arithmetic.ops.linear(x, self.weight, False, self.arithmetic)
        return self.arithmetic.ops.route(logits, self.bias, self.top_k, self.normalises, self.factor, self.arithmetic)


def route(
    logits: Tensor, bias: Tensor, k: int, normalises: bool, factor: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """The k experts [B, T, k] of the highest score + ``bias``, best first, and their weights: the scores without the bias,
    divided by their sum where ``normalises``, times ``factor``; logits [B, T, experts] fp32."""
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

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic):
        super().__init__(1, config.hidden_size, config.moe_intermediate_size, arithmetic, "decoded")

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Reads ``name``.{w1,w2,w3}.{weight,scale}."""
        w1, w2, w3 = (
            decode_fp8(checkpoint.tensor(f"{name}.{part}.weight"), checkpoint.tensor(f"{name}.{part}.scale"), self.w2.dtype)
            for part in ("w1", "w2", "w3")
        )
        fill(self, "w13", torch.cat([w1, w3]).unsqueeze(0))
        fill(self, "w2", w2.unsqueeze(0))


class MoE(nn.Module):
    """Routed experts summed in fp32, the shared expert added in fp32, one rounding."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, is_drafter: bool, expert_storage: str):
        super().__init__()
        self.arithmetic, self.limit = arithmetic, config.swiglu_limit
        experts, _ = config.experts(is_drafter)
        self.gate = Router(config, is_drafter, arithmetic)
        self.experts = ExpertBank(experts, config.hidden_size, config.moe_intermediate_size, arithmetic, expert_storage)
        self.shared_experts = SharedExpert(config, arithmetic)

    def forward(self, x: Tensor) -> Tensor:
        """x = ffn_norm(collapse(streams)) [B, T, d] to the sublayer's output [B, T, d]."""
        ids, weights = self.gate(x)
        quantised = self.arithmetic.activation(x)
        return self.arithmetic.round(local_experts(quantised, ids, weights, self.experts, self.shared_experts, self.limit))
