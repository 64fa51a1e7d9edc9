# SPDX-License-Identifier: Apache-2.0
"""The routed experts' storage, and the operation over them that reads the chosen experts only.

``local_experts`` is one operation to a graph: which experts it reads is decided inside, as a kernel would, so the model
around it reads nothing on the host (docs/model.md, section 7).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint.reader import Checkpoint
from .errors import RequestError
from .formats import decode_fp4, qdq_fp8
from .linear import fill, frozen, sigmoid

EXPERT_STORAGE = ("decoded", "bytes")


class ExpertBank(nn.Module):
    """The weights of all experts of a layer, w1 and w3 stacked: w13 [E, 2I, d], w2 [E, d, I].

    ``decoded`` keeps them in ``dtype``, which holds every fp4 weight exactly; ``bytes`` keeps the stored nibbles
    [E, n, k/2] and scales [E, n, k/32] (uint8) and decodes the chosen experts at each use: a quarter of the memory, slower.
    """

    def __init__(self, experts: int, d: int, inter: int, dtype: torch.dtype, storage: str):
        super().__init__()
        if storage not in EXPERT_STORAGE:
            raise RequestError(f"expert_storage: expected one of {', '.join(EXPERT_STORAGE)}, found {storage!r}")
        self.inter, self.as_bytes = inter, storage == "bytes"
        pack, kind = (2, torch.uint8) if self.as_bytes else (1, dtype)
        self.w13 = frozen(experts, 2 * inter, d // pack, dtype=kind)
        self.w2 = frozen(experts, d, inter // pack, dtype=kind)
        scales = 32 if self.as_bytes else 0
        self.w13_scale = frozen(experts, 2 * inter, d // scales, dtype=torch.uint8) if scales else None
        self.w2_scale = frozen(experts, d, inter // scales, dtype=torch.uint8) if scales else None

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Reads ``name``.{e}.{w1,w2,w3}.{weight,scale} of every expert."""
        for key, parameter in list(self.named_parameters()):
            fill(self, key, torch.empty(parameter.shape, dtype=parameter.dtype))
        for expert in range(self.w13.shape[0]):
            for part, weights, scales in (
                ("w1", self.w13[expert, : self.inter], self._scales(self.w13_scale, expert, slice(self.inter))),
                ("w3", self.w13[expert, self.inter :], self._scales(self.w13_scale, expert, slice(self.inter, None))),
                ("w2", self.w2[expert], self._scales(self.w2_scale, expert, slice(None))),
            ):
                packed = checkpoint.tensor(f"{name}.{expert}.{part}.weight")
                scale = checkpoint.tensor(f"{name}.{expert}.{part}.scale")
                if scales is None:
                    weights.copy_(decode_fp4(packed, scale))
                else:
                    weights.copy_(packed)
                    scales.copy_(scale)

    @staticmethod
    def _scales(scales: Tensor | None, expert: int, rows: slice) -> Tensor | None:
        return None if scales is None else scales[expert, rows]


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit), fp32; limit 0 means no clamp."""
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return gate * sigmoid(gate) * up


@torch.library.custom_op("deepseek_v41::local_experts", mutates_args=())
def local_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    limit: float,
    exact_tokens: int,
    quantize: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The weighted sum of each row's chosen experts: x [B, T, d] fp32, ids and weights [B, T, k] to [B, T, d] fp32.

    Per expert: gate, up = x W13^T rounded to ``dtype``, h = silu(gate) * up * routing weight, rounded,
    fp8 QDQ where ``quantize``, y = h W2^T rounded; summed in fp32. Rows of decode (T <= exact_tokens) run one by one.
    """
    rows, chosen, routing = x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)
    run = _row_by_row if x.shape[1] <= exact_tokens else _expert_by_expert
    return run(rows, chosen, routing, (w13, w13_scale, w2, w2_scale), limit, quantize, dtype).view(x.shape)


@local_experts.register_fake
def _(x, ids, weights, w13, w13_scale, w2, w2_scale, limit, exact_tokens, quantize, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.float32)


Bank = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def _weight(weights: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    return weights[expert] if scales is None else decode_fp4(weights[expert], scales[expert])


def _activate(gate_up: Tensor, routing: Tensor, limit: float, quantize: bool, dtype: torch.dtype) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    h = (clamped_swiglu(gate, up, limit) * routing.unsqueeze(-1)).to(dtype)
    return qdq_fp8(h) if quantize else h.float()


def _row_by_row(x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, limit: float, quantize: bool, dtype: torch.dtype) -> Tensor:
    w13, s13, w2, s2 = bank
    sums = []
    for row, (row_ids, row_routing) in enumerate(zip(ids.tolist(), routing, strict=True)):
        token = x[row : row + 1]
        gate_up = torch.cat([_product(token, _weight(w13, s13, expert), dtype) for expert in row_ids])
        h = _activate(gate_up, row_routing, limit, quantize, dtype)
        y = torch.cat([_product(h[i : i + 1], _weight(w2, s2, expert), dtype) for i, expert in enumerate(row_ids)])
        sums.append(y.float().sum(0, keepdim=True))
    return torch.cat(sums)


def _expert_by_expert(x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, limit: float, quantize: bool, dtype: torch.dtype) -> Tensor:
    w13, s13, w2, s2 = bank
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=w13.shape[0]).tolist()
    out = torch.zeros_like(x)
    for expert, places in enumerate(order.split(counts)):
        if not counts[expert]:
            continue
        rows = places // k
        gate_up = F.linear(x[rows], _weight(w13, s13, expert).float()).to(dtype)
        h = _activate(gate_up, routing.flatten()[places], limit, quantize, dtype)
        out.index_add_(0, rows, F.linear(h, _weight(w2, s2, expert).float()).to(dtype).float())
    return out


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [1, k] fp32 times weight [n, k]: accumulated in fp32, rounded to ``dtype``; x is exact in the weight's dtype."""
    return F.linear(x.to(weight.dtype), weight).to(dtype)
