# SPDX-License-Identifier: Apache-2.0
"""Norms, the rotary embedding, hyper-connections, pooling, the router, SwiGLU and the engram's gate as NKI kernels."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import hyper_connections
from ..rope import rotate_and_quantise
from .nki_launch import PARTITIONS, Launch

if TYPE_CHECKING:
    from ..numerics import Arithmetic

DECODE_ROWS = 8
"""Rows per call on two cores whose sums are folded alike (kernels/nki/fold.py)."""


class RowKernels:
    """Each takes tensors [B, T, ...], passes their rows [B * T, ...] in the arithmetic's dtype and returns fp32."""

    def __init__(self, launch: Launch):
        from .nki.compress_pool import compress_pool
        from .nki.engram_gate import engram_gate
        from .nki.expand import expand
        from .nki.mixes import mixes
        from .nki.rms_norm import collapse, collapse_streams, rms_norm
        from .nki.rotate import rotate
        from .nki.route import route
        from .nki.sublayer_input import sublayer_input
        from .nki.swiglu import swiglu

        self._launch = launch
        self._rms_norm, self._rotate, self._mixes, self._collapse = rms_norm, rotate, mixes, collapse
        self._collapse_streams, self._expand, self._swiglu = collapse_streams, expand, swiglu
        self._engram_gate, self._compress_pool, self._route = engram_gate, compress_pool, route
        self._sublayer_input = sublayer_input

    def normalise(self, x: Tensor, weight: Tensor, eps: float, arithmetic: "Arithmetic") -> Tensor:
        """linear.rms_norm: one kernel call."""
        rows = (_rows(x, 1, arithmetic),)
        return self._apart(self._rms_norm, rows, weight, x.shape[1], arithmetic, eps=eps).view(x.shape)

    def rotate(self, x: Tensor, table: Tensor, arithmetic: "Arithmetic", back: bool = False) -> Tensor:
        """rope.rotate: one kernel call."""
        heads = x if x.dim() == 4 else x.unsqueeze(2)
        return self._launch(self._rotate, _rows(heads, 2, arithmetic), table.flatten(0, 1), back=back).float().view(x.shape)

    def rotate_and_quantise(self, x: Tensor, table: Tensor, form: str, arithmetic: "Arithmetic") -> Tensor:
        """rope.rotate_and_quantise: one kernel call for values that bf16 holds, two for others."""
        if not arithmetic.rounds:
            return rotate_and_quantise(x, table, form, arithmetic)
        rows, constants = _rows(x if x.dim() == 4 else x.unsqueeze(2), 2, arithmetic), {"quantize": True, "form": form}
        return self._launch(self._rotate, rows, table.flatten(0, 1), **constants).float().view(x.shape)

    def sublayer_input(
        self, x: Tensor, pre_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, rounds: int, eps: float,
        norm_eps: float, arithmetic: "Arithmetic",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """hyper_connections.sublayer_input of laid-out weights: one kernel call where fn's parts fit, else one by one.

        Where they fit, scale and base are [hc, 2 + hc] (nki_layout.py).
        """
        if scale.dim() == 1:
            return hyper_connections.sublayer_input(x, pre_mix, fn, scale, base, weight, rounds, eps, norm_eps, arithmetic)
        rows, weights = (_rows(x, 2, arithmetic), pre_mix.flatten(0, 1)), (fn, scale, base, weight.unsqueeze(0))
        constants = {"rounds": rounds, "eps": eps, "norm_eps": norm_eps, "cores": fn.shape[0]}
        h, *mixes = self._launch(self._sublayer_input, *rows, *weights, **constants)
        pre, post, comb = (one.unflatten(0, x.shape[:2]) for one in mixes)
        return h.float().unflatten(0, x.shape[:2]), pre, post, comb

    def mixes(
        self, raw: Tensor, x: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float, norm_eps: float,
        arithmetic: "Arithmetic",
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """hyper_connections.mixes: a kernel call per 128 rows."""
        streams = _rows(x, 2, arithmetic).flatten(1)
        parts = max(p for p in range(1, PARTITIONS + 1) if streams.shape[1] % p == 0)
        constants = {"rounds": rounds, "eps": eps, "norm_eps": norm_eps}
        found = [
            self._launch(self._mixes, some, rows.unflatten(1, (parts, -1)), scale.unsqueeze(0), base.unsqueeze(0), **constants)
            for some, rows in zip(raw.flatten(0, 1).split(PARTITIONS), streams.split(PARTITIONS), strict=True)
        ]
        pre, post, comb = (torch.cat(part).unflatten(0, x.shape[:2]) for part in zip(*found, strict=True))
        return pre, post, comb

    def collapse(self, x: Tensor, pre: Tensor, weight: Tensor, eps: float, arithmetic: "Arithmetic") -> Tensor:
        """hyper_connections.collapse: one kernel call."""
        rows = _rows(x, 2, arithmetic), pre.flatten(0, 1)
        return self._apart(self._collapse, rows, weight, x.shape[1], arithmetic, eps=eps).unflatten(0, x.shape[:2])

    def weighted_sum(self, x: Tensor, pre: Tensor, arithmetic: "Arithmetic") -> Tensor:
        """hyper_connections.weighted_sum: one kernel call."""
        found = self._launch(self._collapse_streams, _rows(x, 2, arithmetic), pre.flatten(0, 1))
        return found.float().unflatten(0, x.shape[:2])

    def expand(self, y: Tensor, residual: Tensor, post: Tensor, comb: Tensor, arithmetic: "Arithmetic") -> Tensor:
        """hyper_connections.expand: one kernel call."""
        streams, mixing = _rows(residual, 2, arithmetic), (post.flatten(0, 1), comb.flatten(0, 1))
        return self._launch(self._expand, _rows(y, 1, arithmetic), streams, *mixing).float().view(residual.shape)

    def compress_pool(self, kv: Tensor, score: Tensor, weight: Tensor, eps: float, arithmetic: "Arithmetic") -> Tensor:
        """compressor.compress_pool: one kernel call."""
        rows, constants = (kv.flatten(0, 1), score.flatten(0, 1)), {"eps": eps, "rounds": arithmetic.rounds}
        return self._apart(self._compress_pool, rows, weight, kv.shape[1], arithmetic, **constants).unflatten(0, kv.shape[:2])

    def engram_gate(
        self, x: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float, arithmetic: "Arithmetic"
    ) -> Tensor:
        """engram.layer.engram_gate: one kernel call."""
        streams, keys, values = (_rows(one, 2, arithmetic) for one in (x, key, value))
        rows = streams, keys, values.squeeze(1)
        return self._apart(self._engram_gate, rows, weight, x.shape[1], arithmetic, eps=eps).view(x.shape)

    def route(
        self, logits: Tensor, bias: Tensor, k: int, normalises: bool, factor: float, arithmetic: "Arithmetic"
    ) -> tuple[Tensor, Tensor]:
        """moe.route: one kernel call."""
        rows, constants = (logits.flatten(0, 1), bias.unsqueeze(0)), {"k": k, "normalises": normalises, "factor": factor}
        ids, weights = self._launch(self._route, *rows, **constants)
        return ids.long().unflatten(0, logits.shape[:2]), weights.unflatten(0, logits.shape[:2])

    def _apart(
        self, kernel: Any, rows: tuple[Tensor, ...], weight: Tensor, tokens: int, arithmetic: "Arithmetic", **constants: Any
    ) -> Tensor:
        """kernel(*rows, weight) in fp32; in decode in calls of at most DECODE_ROWS rows, which are summed in the same order."""
        most = DECODE_ROWS if tokens <= arithmetic.exact_tokens else rows[0].shape[0]
        shared = weight if weight.dim() == 2 else weight.unsqueeze(0)
        calls = zip(*(part.split(most) for part in rows), strict=True)
        return torch.cat([self._launch(kernel, *call, shared, **constants) for call in calls]).float()

    def swiglu(self, gate_up: Tensor, routing: Tensor | None, limit: float, arithmetic: "Arithmetic") -> Tensor:
        """experts.swiglu: one kernel call."""
        rows = gate_up.flatten(0, -2).to(arithmetic.dtype)
        weights = () if routing is None else (routing.reshape(-1, 1),)
        found = self.hidden(rows, *weights, limit=limit, quantize=arithmetic.quantize_activations)
        return found.float().unflatten(0, gate_up.shape[:-1])

    def hidden(self, gate_up: Tensor, routing: Tensor | None = None, *, limit: float, quantize: bool) -> Tensor:
        """The same of rows [m, 2I] and routing [m, 1] in the kernel's dtypes."""
        weights = () if routing is None else (routing,)
        return self._launch(self._swiglu, gate_up, *weights, limit=limit, quantize=quantize)


def _rows(x: Tensor, keep: int, arithmetic: "Arithmetic") -> Tensor:
    """x as [rows, ...] with its last ``keep`` dimensions, in the arithmetic's dtype."""
    return x.flatten(0, -keep - 1).to(arithmetic.dtype)
