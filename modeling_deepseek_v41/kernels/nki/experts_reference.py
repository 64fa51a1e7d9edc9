# SPDX-License-Identifier: Apache-2.0
"""The experts kernel's PyTorch reference: the package's own SwiGLU and QDQ around plain products."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...experts import swiglu
from ...fp8_exact import ExactRows, decode_rows
from ...numerics import Arithmetic
from ..dispatch import TORCH


def local_experts(
    x: Tensor, routing: Tensor, experts: list[tuple[ExactRows, ExactRows, ExactRows]], limit: float,
    quantize: bool = True, round_experts: bool = False,
) -> Tensor:  # fmt: skip
    """[M, hidden] fp32, the experts' weighted sum for every row of x [M, hidden] bf16, as experts.expert_by_expert has it.

    routing [E, M] fp32, 0 where the row did not choose the expert; ``experts`` (w1, w3, w2) each. ``quantize``: h passes the
    activation QDQ. ``round_experts``: an expert's result is rounded to bf16 before the sum, as release numerics ask where one
    core has a whole expert; a share of the columns gives a part of it, which stays fp32.
    """
    arithmetic = Arithmetic(torch.bfloat16, quantize, quantize, ops=TORCH, exact_tokens=0)
    total = torch.zeros(x.shape)
    for weights, (w1, w3, w2) in zip(routing, experts, strict=True):
        gate_up = arithmetic.round(F.linear(x.float(), torch.cat([decode_rows(rows.codes, rows.scale) for rows in (w1, w3)])))
        y = F.linear(swiglu(gate_up, weights, limit, arithmetic), decode_rows(w2.codes, w2.scale))
        total += arithmetic.round(y) if round_experts else y
    return total
