# SPDX-License-Identifier: Apache-2.0
"""The operation over a layer's experts that reads the chosen ones only.

``local_experts`` is one operation to a graph: which experts it reads is decided inside, as a kernel would, so the model
around it reads nothing on the host (docs/model.md, section 7).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .expert_bank import ExpertBank, Weight, weights_of
from .linear import sigmoid
from .numerics import Arithmetic


def swiglu(gate_up: Tensor, routing: Tensor | None, limit: float, arithmetic: Arithmetic) -> Tensor:
    """The input of w2: gate, up = halves of gate_up [..., 2I] fp32; silu(gate) * up * routing [...], rounded, fp8 QDQ.

    gate is clamped from above and up on both sides to ``limit``; 0 means no clamp. No ``routing`` means 1.
    """
    gate, up = gate_up.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    h = gate * sigmoid(gate) * up
    if routing is not None:
        h = h * routing.unsqueeze(-1)
    return arithmetic.activation(arithmetic.round(h))


_LIBRARY = torch.library.Library("deepseek_v41", "DEF")
_LIBRARY.define(
    "local_experts(Tensor x, Tensor ids, Tensor weights, Tensor[] bank, bool whole, Tensor shared, float limit,"
    " ScalarType dtype, bool quantize, int exact_tokens, str kernels) -> Tensor"
)


def local_experts(x: Tensor, ids: Tensor, weights: Tensor, bank: ExpertBank, shared: Tensor, limit: float) -> Tensor:
    """Each row's chosen experts, weighted, plus ``shared``, the shared one's result: x and shared [B, T, d] fp32, ids and
    weights [B, T, k] to [B, T, d] fp32.

    An id of E, the bank's number of experts, is another rank's expert and adds nothing.
    Per expert: gate, up = x W13^T rounded to the arithmetic's dtype, h = silu(gate) * up * routing weight, rounded, fp8
    QDQ where the arithmetic asks for it, y = h W2^T rounded; summed in fp32. x has passed that QDQ already. Rows of decode
    (T <= exact_tokens) run one by one.
    """
    a = bank.arithmetic
    return torch.ops.deepseek_v41.local_experts(
        x, ids, weights, bank.tensors, bank.whole, shared, limit, a.dtype, a.quantize_activations, a.exact_tokens, a.ops.name
    )


def _arithmetic(dtype: torch.dtype, quantize: bool, exact_tokens: int, kernels: str) -> Arithmetic:
    """What the operation's plain arguments stand for."""
    from .kernels.dispatch import operations

    return Arithmetic(dtype, quantize, quantize, ops=operations(kernels), exact_tokens=exact_tokens)


@torch.library.impl(_LIBRARY, "local_experts", "CPU")
def _local_experts(
    x: Tensor, ids: Tensor, weights: Tensor, bank: list[Tensor], whole: bool, shared: Tensor, limit: float,
    dtype: torch.dtype, quantize: bool, exact_tokens: int, kernels: str,
) -> Tensor:  # fmt: skip
    arithmetic = _arithmetic(dtype, quantize, exact_tokens, kernels)
    run = arithmetic.ops.expert_rows if x.shape[1] <= exact_tokens else arithmetic.ops.expert_by_expert
    rows, chosen, routing, added = (one.flatten(0, 1) for one in (x, ids, weights, shared))
    return run(rows, chosen, routing, as_bank(bank, whole), added, limit, arithmetic).view(x.shape)


@torch.library.impl(_LIBRARY, "local_experts", "CompositeExplicitAutograd")
def _traced_experts(
    x: Tensor, ids: Tensor, weights: Tensor, bank: list[Tensor], whole: bool, shared: Tensor, limit: float,
    dtype: torch.dtype, quantize: bool, exact_tokens: int, kernels: str,
) -> Tensor:  # fmt: skip
    """Wherever a tensor cannot be read on the host to choose experts by it."""
    arithmetic = _arithmetic(dtype, quantize, exact_tokens, kernels)
    rows, chosen, routing, added = (one.flatten(0, 1) for one in (x, ids, weights, shared))
    return arithmetic.ops.every_expert(rows, chosen, routing, as_bank(bank, whole), added, limit, arithmetic).view(x.shape)


@torch.library.register_fake("deepseek_v41::local_experts", lib=_LIBRARY)
def _shape(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


class Bank(NamedTuple):
    """The tensors and facts of an ``ExpertBank``."""

    w13: Weight
    w2: Weight
    whole: bool
    share: float

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.w13.rows.shape[0]

    def round(self, y: Tensor, arithmetic: Arithmetic) -> Tensor:
        """Results of w2, rounded where they are whole."""
        return arithmetic.round(y) if self.whole else y


def as_bank(tensors: list[Tensor], whole: bool, share: float = 1.0) -> Bank:
    """The inverse of ``ExpertBank.tensors``."""
    return Bank(*weights_of(tensors), whole, share)


def shared_expert(x: Tensor, shared: Bank, limit: float, arithmetic: Arithmetic) -> Tensor:
    """The result [B, T, d] fp32 of the one expert of ``shared`` for x [B, T, d] fp32, which has passed the QDQ.

    Rows of decode run one by one, as the routed experts' do on a CPU; in a device's graph all rows are one product.
    """
    rows = x.flatten(0, 1)
    if x.shape[1] > arithmetic.exact_tokens or x.device.type != "cpu":
        return one_expert(rows, 0, None, shared, limit, arithmetic).view(x.shape)
    one = rows.new_ones(1)
    return torch.cat([one_row(row, [0], one, shared, limit, arithmetic) for row in rows.split(1)]).view(x.shape)


def expert_rows(
    x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Tensor, limit: float, arithmetic: Arithmetic
) -> Tensor:
    """The chosen experts' sum and ``shared`` [n, d], a row at a time: x [n, d], ids and routing [n, k] to [n, d]."""
    experts, sums = bank.experts, []
    for row, row_ids in enumerate(ids.tolist()):
        token, weights, y = x[row : row + 1], routing[row], shared[row : row + 1]
        if max(row_ids) == experts:
            weights = weights[ids[row] < experts]
            row_ids = [expert for expert in row_ids if expert < experts]
        if row_ids:
            y = one_row(token, row_ids, weights, bank, limit, arithmetic) + y
        sums.append(y)
    return torch.cat(sums)


def one_row(x: Tensor, ids: list[int], routing: Tensor, bank: Bank, limit: float, arithmetic: Arithmetic) -> Tensor:
    """Experts ``ids`` of one row [1, d], weighted with routing [len(ids)]: the sum [1, d]."""
    w13, w2, _, share = bank
    token = x.to(w13.rows.dtype if w13.scale is None else torch.float32)
    gate_up = torch.cat([F.linear(token, w13.of(expert)) for expert in ids])
    kind = token.dtype if bank.whole else torch.float32
    h = arithmetic.ops.swiglu(arithmetic.round(gate_up), routing, limit, arithmetic).to(kind)
    y = torch.cat([F.linear(h[i : i + 1], w2.of(expert).to(kind)) for i, expert in enumerate(ids)])
    return bank.round(y, arithmetic).sum(0, keepdim=True) * share


def expert_by_expert(
    x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Tensor, limit: float, arithmetic: Arithmetic
) -> Tensor:
    """The same an expert at a time, over all the rows that chose it: the fp32 sums come in another order."""
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=bank.experts + 1).tolist()
    out = torch.zeros_like(x)
    for expert, places in enumerate(order.split(counts)[:-1]):
        if counts[expert]:
            rows = places // k
            out.index_add_(0, rows, one_expert(x[rows], expert, routing.flatten()[places], bank, limit, arithmetic))
    return out.add_(shared)


def every_expert(
    x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Tensor, limit: float, arithmetic: Arithmetic
) -> Tensor:
    """The same without a look at ``ids``: every expert over all rows, with weight 0 where it was not chosen."""
    out = shared
    for expert, weights in enumerate(routing_table(ids, routing, bank.experts).unbind(1)):
        out = out + one_expert(x, expert, weights, bank, limit, arithmetic)
    return out


def routing_table(ids: Tensor, routing: Tensor, experts: int) -> Tensor:
    """ids and routing [n, k] to the weight of every expert in every row [n, experts], 0 where it was not chosen."""
    return routing.new_zeros(ids.shape[0], experts + 1).scatter(1, ids, routing)[:, :experts]


def one_expert(x: Tensor, expert: int, routing: Tensor | None, bank: Bank, limit: float, arithmetic: Arithmetic) -> Tensor:
    """One expert of rows [n, d], weighted with routing [n], or not: [n, d]."""
    w13, w2, _, share = bank
    gate_up = arithmetic.round(F.linear(x, w13.of(expert).float()))
    h = arithmetic.ops.swiglu(gate_up, routing, limit, arithmetic)
    return bank.round(F.linear(h, w2.of(expert).float()), arithmetic) * share
