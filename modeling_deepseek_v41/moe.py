# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: router, routed experts and the shared expert (docs/model.md, section 7)."""

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .experts import ExpertBank, clamped_swiglu, local_experts
from .linear import Linear, frozen
from .numerics import Numerics
from .rows import by_rows, tiled_linear
from .topk import top_positions


class Router(nn.Module):
    """sqrt(softplus(logit)) scores; the bias chooses, the scores without it weigh. All of it is fp32."""

    def __init__(self, config: ModelConfig, is_drafter: bool, exact_tokens: int):
        super().__init__()
        experts, self.top_k = config.experts(is_drafter)
        self.normalise = config.norm_topk_prob and self.top_k > 1
        self.factor, self.exact_tokens = config.routed_scaling_factor, exact_tokens
        self.weight = frozen(experts, config.hidden_size)
        self.bias = frozen(experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, d] to expert ids [B, T, k] int64, best first, and routing weights [B, T, k] fp32."""
        scores = by_rows(sqrt_softplus, self.exact_tokens, tiled_linear(x.float(), self.weight, self.exact_tokens))
        ids = top_positions(scores + self.bias, self.top_k)
        weights = scores.gather(-1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.factor


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) in fp32 without over- or underflow for x in +-200; below -16 it is exp(x / 2)."""
    soft = x.clamp_min(0) + x.abs().neg_().exp_().log1p_()
    return torch.where(x < -16.0, (x * 0.5).exp_(), soft.sqrt_())


class SharedExpert(nn.Module):
    """The expert that every token uses: fp8 weights, the same clamp, no routing weight."""

    def __init__(self, config: ModelConfig, numerics: Numerics, exact_tokens: int):
        super().__init__()
        d, inter = config.hidden_size, config.moe_intermediate_size
        self.limit, self.numerics, self.exact_tokens = config.swiglu_limit, numerics, exact_tokens
        self.w1 = Linear(d, inter, numerics.dtype, exact_tokens, fp8=True)
        self.w3 = Linear(d, inter, numerics.dtype, exact_tokens, fp8=True)
        self.w2 = Linear(inter, d, numerics.dtype, exact_tokens, fp8=True)

    def forward(self, quantised: Tensor) -> Tensor:
        """The quantised input [B, T, d] to [B, T, d]."""
        h = clamped_swiglu(self.w1(quantised).float(), self.w3(quantised).float(), self.limit)
        return self.w2(self.numerics.activation(h.to(self.numerics.dtype)))


class MoE(nn.Module):
    """Routed experts summed in fp32, the shared expert added in fp32, one rounding."""

    def __init__(self, config: ModelConfig, numerics: Numerics, exact_tokens: int, is_drafter: bool, expert_storage: str):
        super().__init__()
        self.numerics, self.limit, self.exact_tokens = numerics, config.swiglu_limit, exact_tokens
        experts, _ = config.experts(is_drafter)
        self.gate = Router(config, is_drafter, exact_tokens)
        self.experts = ExpertBank(experts, config.hidden_size, config.moe_intermediate_size, numerics.dtype, expert_storage)
        self.shared_experts = SharedExpert(config, numerics, exact_tokens)

    def forward(self, x: Tensor) -> Tensor:
        """x = ffn_norm(collapse(streams)) [B, T, d] to the sublayer's output [B, T, d]."""
        ids, weights = self.gate(x)
        quantised = self.numerics.activation(x)
        bank = self.experts
        routed = local_experts(
            quantised, ids, weights, bank.w13, bank.w13_scale, bank.w2, bank.w2_scale, self.limit, self.exact_tokens,
            self.numerics.quantize_activations, self.numerics.dtype,
        )  # fmt: skip
        return (routed + self.shared_experts(quantised).float()).to(x.dtype)
