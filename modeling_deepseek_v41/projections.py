# SPDX-License-Identifier: Apache-2.0
"""Linears that belong together: the attention's before and behind it (docs/model.md, section 4), small ones side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .parallel import own_part

if TYPE_CHECKING:
    from .numerics import Arithmetic

Part = tuple[int, Tensor]
"""Into how many parts a latent is cut, and the place [1] int64 of the rank's own."""


class Projected(NamedTuple):
    """What a layer's attention, compressor and indexer make of its input: fp32, before what follows, but for ``kv``."""

    q: Tensor
    """[B, T, n]."""
    kv: Tensor
    """[B, T, D] of the arithmetic's dtype: window KV as it is cached."""
    of_qr: list[Tensor]
    """[B, T, n] of each further weight of the queries' latent."""
    of_x: list[Tensor]
    """[B, T, n] of each further weight of the input itself."""


def query_projection(
    x: Tensor, table: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, kv_norm: Tensor, eps: float,
    arithmetic: "Arithmetic", of_qr: Sequence[Tensor] = (), of_x: Sequence[tuple[Tensor, bool]] = (),
) -> Projected:  # fmt: skip
    """q = wq_b(qr), qr = activation(norm(wq_a(activation(x)))) [B, T, L], window KV of wkv(activation(x)), further weights.

    x [B, T, d] fp32, not yet through the activation QDQ; ``table`` [B, T, 2, R] the rotary rows of the KV; weights [L, d],
    [n, L] and [D, d] fp32 or bf16, q_norm [L] and kv_norm [D] fp32, ``eps`` of both norms.
    ``of_qr``: weights [n, L] that take qr. ``of_x``: weights [n, d] that take x as it is, and whether the result is rounded to
    the arithmetic's dtype, as all others are.
    """
    ops, quantised = arithmetic.ops, arithmetic.activation(x)
    qr = arithmetic.activation(ops.normalise(ops.linear(quantised, wq_a, True, arithmetic), q_norm, eps, arithmetic))
    q, *others = (ops.linear(qr, weight, True, arithmetic) for weight in (wq_b, *of_qr))
    latent = ops.normalise(ops.linear(quantised, wkv, True, arithmetic), kv_norm, eps, arithmetic)
    kv = arithmetic.rotated_window_kv(latent, table)
    return Projected(q, kv, others, [ops.linear(x, weight, rounds, arithmetic) for weight, rounds in of_x])


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


def quantised_linears(xs: Sequence[Tensor], weights: Sequence[Tensor], arithmetic: "Arithmetic") -> list[Tensor]:
    """Each of ``weights`` [n, k] fp32 or bf16 of activation(x), for the one x in ``xs`` or one for each weight.

    x [B, T, k] fp32, not yet through the activation QDQ; results [B, T, n] fp32, rounded to the arithmetic's dtype.
    """
    quantised = [arithmetic.activation(x) for x in xs]
    inputs = quantised if len(xs) == len(weights) else quantised * len(weights)
    return [arithmetic.ops.linear(x, weight, True, arithmetic) for x, weight in zip(inputs, weights, strict=True)]
