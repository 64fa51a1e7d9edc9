# SPDX-License-Identifier: Apache-2.0
"""Which arithmetic a model instance uses: chosen once, at construction."""

import dataclasses

import torch
from torch import Tensor

from .errors import RequestError
from .kernels.operations import Operations


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The rounding points of one way to compute the model (docs/model.md, section 1).

    dtype: of the streams' and every linear's values, of caches and of attention probabilities.
    quantize_activations: whether the input of a quantised linear passes through fp8 QDQ.
    quantize_cache: whether window KV, compressed KV, index keys and index queries pass through their QDQ.
    """

    dtype: torch.dtype
    quantize_activations: bool
    quantize_cache: bool


NUMERICS = {
    "release": Numerics(torch.bfloat16, quantize_activations=True, quantize_cache=True),
    "fp32": Numerics(torch.float32, quantize_activations=False, quantize_cache=True),
    "fp32_no_qdq": Numerics(torch.float32, quantize_activations=False, quantize_cache=False),
}


def numerics_by_name(name: str) -> Numerics:
    """The arithmetic called ``name``: release, fp32 or fp32_no_qdq; raises RequestError for another name."""
    if not isinstance(name, str) or name not in NUMERICS:
        raise RequestError(f"numerics: expected one of {', '.join(NUMERICS)}, found {name!r}")
    return NUMERICS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic(Numerics):
    """Numerics as a model's modules use them. Activations are fp32 tensors whose values are rounded to ``dtype``.

    ops: the implementation of the operations (kernels/dispatch.py).
    exact_tokens: calls of at most this many tokens per sequence keep rows apart to the bit (rows.py).
    weight_dtype: what linears and routers hold their weights in, fp32 or bf16. Either holds the stored values exactly.
    """

    ops: Operations
    exact_tokens: int
    weight_dtype: torch.dtype = torch.float32

    @property
    def rounds(self) -> bool:
        """Whether ``dtype`` holds less than fp32."""
        return self.dtype != torch.float32

    def round(self, x: Tensor) -> Tensor:
        """x with its values rounded to ``dtype``, as fp32."""
        return x.to(self.dtype).float()

    def activation(self, x: Tensor) -> Tensor:
        """The input [..., k] of a quantised linear: fp8 QDQ per 32 where this arithmetic asks for it."""
        return self.ops.quantise(x, self) if self.quantize_activations else x

    def window_kv(self, kv: Tensor) -> Tensor:
        """Window KV [..., head_dim] as it is cached: fp8 QDQ per 32, ``dtype``."""
        return (self.ops.quantise(kv, self) if self.quantize_cache else kv).to(self.dtype)

    def compressed_kv(self, kv: Tensor) -> Tensor:
        """Compressed KV [..., head_dim] as it is cached: fp4 QDQ per 16 with e4m3 scales, ``dtype``."""
        return (self.ops.quantise_compressed(kv) if self.quantize_cache else kv).to(self.dtype)

    def index(self, x: Tensor) -> Tensor:
        """Index keys or queries [..., index_head_dim]: fp4 QDQ per 32 with ue8m0 scales, ``dtype``."""
        return (self.ops.quantise_index(x) if self.quantize_cache else x).to(self.dtype)

    def rotated_window_kv(self, kv: Tensor, table: Tensor) -> Tensor:
        """``window_kv`` of kv [B, T, head_dim], rotated by ``table`` [B, T, 2, R] before: one operation, which may be fused."""
        return self._rotated(kv, table, "fp8")

    def rotated_compressed_kv(self, kv: Tensor, table: Tensor) -> Tensor:
        """``compressed_kv`` of kv [B, n, head_dim], rotated before."""
        return self._rotated(kv, table, "fp4_e4m3")

    def rotated_index(self, x: Tensor, table: Tensor) -> Tensor:
        """``index`` of keys [B, n, index_head_dim] or queries [B, T, heads, index_head_dim], rotated before."""
        return self._rotated(x, table, "fp4_ue8m0")

    def _rotated(self, x: Tensor, table: Tensor, form: str) -> Tensor:
        turned = self.ops.rotate_and_quantise(x, table, form, self) if self.quantize_cache else self.ops.rotate(x, table, self)
        return turned.to(self.dtype)
