# SPDX-License-Identifier: Apache-2.0
"""The attention's projections, before and behind it, as one operation each (docs/model.md, section 4)."""

from typing import TYPE_CHECKING

from torch import Tensor

from .parallel import own_part

if TYPE_CHECKING:
    from .numerics import Arithmetic

Part = tuple[int, Tensor]
"""Into how many parts a latent is cut, and the place [1] int64 of the rank's own."""


def query_projection(
    x: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, eps: float, arithmetic: "Arithmetic"
) -> tuple[Tensor, Tensor, Tensor]:
    """q = wq_b(qr) [B, T, n], qr = activation(norm(wq_a(activation(x)))) [B, T, L] and kv = wkv(activation(x)) [B, T, D].

    x [B, T, d] fp32, not yet through the activation QDQ; weights [L, d], [n, L] and [D, d] fp32 or bf16, q_norm [L] fp32.
    Each result is fp32, rounded to the arithmetic's dtype; kv is before its norm.
    """
    ops, quantised = arithmetic.ops, arithmetic.activation(x)
    qr = arithmetic.activation(ops.normalise(ops.linear(quantised, wq_a, True, arithmetic), q_norm, eps, arithmetic))
    return ops.linear(qr, wq_b, True, arithmetic), qr, ops.linear(quantised, wkv, True, arithmetic)


def output_projection(
    o: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int, part: Part | None, rounds: bool, arithmetic: "Arithmetic"
) -> Tensor:
    """wo_b(part of activation(low)), where ``low`` is wo_a of each of the ``groups`` of heads, side by side: [B, T, d] fp32.

    o [B, T, h, D] fp32; wo_a [groups * n, h / groups * D] and wo_b [d, L] fp32 or bf16. ``part``: the part of the latent
    [B, T, groups * n] that wo_b has weights for, None for all of it. ``rounds``: the result is rounded to the arithmetic's
    dtype, as it is where no other rank adds to it.
    """
    rows, weight = o.unflatten(2, (groups, -1)).flatten(-2), wo_a.unflatten(0, (groups, -1))
    low = arithmetic.activation(arithmetic.ops.grouped(rows, weight, arithmetic).flatten(-2))
    if part is not None:
        low = own_part(low, low.shape[-1], *part)
    return arithmetic.ops.linear(low, wo_b, rounds, arithmetic)
