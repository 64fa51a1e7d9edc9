# SPDX-License-Identifier: Apache-2.0
"""The compiled loops on CPU tensors: arguments and results of the PyTorch functions that dispatch.py pairs them with.

Matrix products and attention of calls longer than decode and verification, where matrix libraries are at their best, go to
PyTorch; so does everything on experts that are not kept in bf16.
"""

import numpy as np
import torch
from torch import Tensor

from .. import attention, experts, indexer, rows
from ..experts import Bank
from ..numerics import Arithmetic
from ..state import GROUP_TILE, State
from . import attention_rows, matrix_rows, rowwise

F32 = np.float32


def _rows(x: Tensor, keep: int) -> np.ndarray:
    """fp32 x as a contiguous array [n, ...] with the last ``keep`` dimensions; it shares x's memory where x is contiguous."""
    array = x.contiguous().numpy()
    return array.reshape(-1, *array.shape[array.ndim - keep :])


def _weight(weight: Tensor) -> np.ndarray:
    """A parameter as numba sees it. The view is kept on the parameter, for making one costs as much as a small loop."""
    view = getattr(weight, "view_of_rows", None)
    if view is None or view[0] != weight.data_ptr():
        view = weight.data_ptr(), _stored(weight.detach())
        weight.view_of_rows = view  # type: ignore[attr-defined]
    return view[1]


def _work(x: Tensor, arithmetic: Arithmetic) -> int:
    """What a loop over the rows of x [B, T, ...] reads, as ``threaded`` asks for it: 0 in decode."""
    return x.numel() if x.shape[1] > arithmetic.exact_tokens else 0


def _stored(x: Tensor) -> np.ndarray:
    """A cache or weight as numba sees it: bf16 as uint16, fp32 as it is."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def quantise(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    out = torch.empty(x.shape)
    rowwise.quantise(x.numel(), _rows(x, 1), _rows(out, 1))
    return out


def quantise_index(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    rowwise.quantise_index(x.numel(), _rows(x, 1), _rows(out, 1))
    return out


def normalise(x: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    out = torch.empty(x.shape)
    rowwise.normalise(_work(x, arithmetic), _rows(x, 1), _weight(weight), F32(eps), arithmetic.rounds, _rows(out, 1))
    return out


def rotate(x: Tensor, table: Tensor, arithmetic: Arithmetic, back: bool = False) -> Tensor:
    out = torch.empty(x.shape)
    heads = x.dim() - 2
    array = _rows(x, 2) if heads == 2 else _rows(x.unsqueeze(-2), 2)
    sign, turned = F32(-1 if back else 1), out.view(array.shape).numpy()
    rowwise.rotate(_work(x, arithmetic), array, _rows(table, 2), sign, arithmetic.rounds, turned)
    return out


def mixes(
    raw: Tensor, x: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float, norm_eps: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor, Tensor]:
    hc = x.shape[-2]
    pre, post, comb = (torch.empty(*x.shape[:2], *shape) for shape in ((hc,), (hc,), (hc, hc)))
    arrays = _rows(raw, 1), _rows(x, 2).reshape(-1, hc * x.shape[-1]), _weight(scale), _weight(base)
    outs = _rows(pre, 1), _rows(post, 1), _rows(comb, 2)
    rowwise.mixes(_work(x, arithmetic), *arrays, rounds, F32(eps), F32(norm_eps), *outs)
    return pre, post, comb


def collapse(x: Tensor, pre: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    h = torch.empty(*x.shape[:2], x.shape[-1])
    work, rounds = _work(x, arithmetic), arithmetic.rounds
    rowwise.collapse(work, _rows(x, 2), _rows(pre, 1), _weight(weight), F32(eps), rounds, _rows(h, 1))
    return h


def expand(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor, arithmetic: Arithmetic) -> Tensor:
    out = torch.empty(residual.shape)
    work, rounds = _work(residual, arithmetic), arithmetic.rounds
    rowwise.expand(work, _rows(y, 1), _rows(residual, 2), _rows(post, 1), _rows(comb, 2), rounds, _rows(out, 2))
    return out


def route(
    logits: Tensor, bias: Tensor, k: int, normalises: bool, factor: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    ids = torch.empty(*logits.shape[:2], k, dtype=torch.int64)
    weights = torch.empty(*logits.shape[:2], k)
    work, arrays = _work(logits, arithmetic), (ids.view(-1, k).numpy(), _rows(weights, 1))
    rowwise.route(work, _rows(logits, 1), _weight(bias), normalises, F32(factor), *arrays)
    return ids, weights


def swiglu(gate_up: Tensor, routing: Tensor | None, limit: float, arithmetic: Arithmetic) -> Tensor:
    inter = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], inter)
    rows = _rows(gate_up, 1)
    weights = np.ones(rows.shape[0], F32) if routing is None else routing.contiguous().view(-1).numpy()
    flags = arithmetic.rounds, arithmetic.quantize_activations
    rowwise.swiglu(gate_up.numel(), rows, weights, F32(limit), *flags, _rows(out, 1))
    return out


def shared_expert(x: Tensor, shared: Bank, limit: float, arithmetic: Arithmetic) -> Tensor:
    if x.shape[1] > arithmetic.exact_tokens:
        return experts.shared_expert(x, shared, limit, arithmetic)
    w13, w2, out = _weight(shared.w13.rows), _weight(shared.w2.rows), torch.empty(x.shape)
    options = F32(shared.share), F32(limit), arithmetic.rounds, shared.whole, arithmetic.quantize_activations
    matrix_rows.one_expert(w13.size, _rows(x, 1), w13, w2, *options, _rows(out, 1))
    return out


def expert_rows(
    x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Tensor, limit: float, arithmetic: Arithmetic
) -> Tensor:
    if bank.w13.scale is not None:
        return experts.expert_rows(x, ids, routing, bank, shared, limit, arithmetic)
    out = torch.empty(x.shape)
    arrays = (tensor.contiguous().numpy() for tensor in (x, ids, routing, shared, out))
    weights = [_weight(weight.rows) for weight in (bank.w13, bank.w2)]
    options = F32(limit), arithmetic.rounds, bank.whole, arithmetic.quantize_activations
    for row, chosen, shares, added, total in zip(*arrays, strict=True):
        here = chosen < bank.experts
        if not here.all():
            chosen, shares = chosen[here], shares[here]
        matrix_rows.experts(bank.w13.rows[0].numel(), row, chosen, shares, *weights, added, *options, total)
    return out


def linear(x: Tensor, weight: Tensor, rounds: bool, arithmetic: Arithmetic) -> Tensor:
    if x.shape[1] > arithmetic.exact_tokens:
        return rows.linear(x, weight, rounds, arithmetic)
    out = torch.empty(*x.shape[:2], weight.shape[0])
    matrix_rows.linear(weight.numel(), _rows(x, 1), _weight(weight), rounds and arithmetic.rounds, _rows(out, 1))
    return out


def grouped(x: Tensor, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
    if x.shape[1] > arithmetic.exact_tokens:
        return rows.grouped(x, weight, arithmetic)
    out = torch.empty(*x.shape[:3], weight.shape[1])
    matrix_rows.grouped(weight.numel(), _rows(x, 2), _stored(weight), arithmetic.rounds, _rows(out, 2))
    return out


def attend(
    q: Tensor, kv: Tensor, ring: str, far: attention.Far | None, table: Tensor, sink: Tensor, window: int, state: State,
    arithmetic: Arithmetic,
) -> Tensor:  # fmt: skip
    if q.shape[1] > arithmetic.exact_tokens:
        return attention.attend(q, kv, ring, far, table, sink, window, state, arithmetic)
    return _attend_rows(q, kv, ring, far, table, sink, window, list(range(q.shape[1])), state, arithmetic)


def attend_block(
    q: Tensor, kv: Tensor, ring: str, table: Tensor, sink: Tensor, window: int, state: State, arithmetic: Arithmetic
) -> Tensor:
    tokens = q.shape[1]
    if tokens > arithmetic.exact_tokens:
        return attention.attend_block(q, kv, ring, table, sink, window, state, arithmetic)
    # The causal loop at the block's last position, its window as much longer, sees exactly the keys of every query.
    places = [tokens - 1] * tokens
    return _attend_rows(q, kv, ring, None, table, sink, window + tokens, places, state, arithmetic)


def _attend_rows(
    q: Tensor, kv: Tensor, ring: str, far: attention.Far | None, table: Tensor, sink: Tensor, window: int,
    places: list[int], state: State, arithmetic: Arithmetic,
) -> Tensor:  # fmt: skip
    """Every query of the call on its own, as if token t stood ``places`` [T] positions behind the call's start."""
    out = torch.empty(q.shape)
    call = state.call
    queries, own, tables, outs = q.contiguous().numpy(), _stored(kv.contiguous()), table.contiguous().numpy(), out.numpy()
    work = q.shape[2] * q.shape[3] * (window + (0 if far is None else far[1].shape[-1]))
    rings, scale, sinks = _stored(state[ring]), F32(q.shape[-1] ** -0.5), _weight(sink)
    caches, chosen = (_stored(far[0]), far[1].numpy()) if far is not None else (rings, np.empty((*q.shape[:2], 0), np.int64))
    for row, (slot, start) in enumerate(zip(call.slot.clamp_min(0).tolist(), call.start.tolist(), strict=True)):
        for t, place in enumerate(places):
            attention_rows.attend(
                work, queries[row, t], own[row], rings[slot], caches[slot], chosen[row, t], tables[row, t], sinks,
                start + place, start, window, scale, arithmetic.rounds, outs[row, t],
            )  # fmt: skip
    return out


def index_scores(
    query: Tensor, weights: Tensor, keys: Tensor, slot: Tensor, count: int, arithmetic: Arithmetic, tile: int = GROUP_TILE
) -> Tensor:
    if query.shape[0] > 1:
        return indexer.index_scores(query, weights, keys, slot, count, arithmetic, tile)
    out = torch.empty(1, count)
    queries, shares, stored = query[0].float().numpy(), weights[0].float().numpy(), _stored(keys)[int(slot)]
    work = query[0].numel() * count
    attention_rows.index_scores(work, queries, shares, stored, arithmetic.rounds, out[0].numpy())
    return out


def top_ascending(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    out = torch.empty(*scores.shape[:-1], k, dtype=torch.int64)
    rowwise.top_ascending(scores.numel(), scores.float().contiguous().numpy(), visible.contiguous().numpy(), out.numpy())
    return out
