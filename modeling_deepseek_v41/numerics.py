# SPDX-License-Identifier: Apache-2.0
"""Which arithmetic a model instance uses: chosen once, at construction."""

import dataclasses

import torch
from torch import Tensor

from .errors import RequestError
from .formats import qdq_fp4_e4m3, qdq_fp4_ue8m0, qdq_fp8


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The rounding points of one way to compute the model (docs/model.md, section 1).

    dtype: of the residual streams, of every linear's result, of caches and of attention probabilities.
    quantize_activations: whether the input of a quantised linear passes through fp8 QDQ.
    quantize_cache: whether window KV, compressed KV, index keys and index queries pass through their QDQ.
    """

    dtype: torch.dtype
    quantize_activations: bool
    quantize_cache: bool

    def activation(self, x: Tensor) -> Tensor:
        """The input [..., k] of a quantised linear, as fp32: fp8 QDQ per 32 where this arithmetic asks for it."""
        return qdq_fp8(x) if self.quantize_activations else x.float()

    def window_kv(self, kv: Tensor) -> Tensor:
        """Window KV [..., head_dim] as it is cached: fp8 QDQ per 32, ``dtype``."""
        return (qdq_fp8(kv) if self.quantize_cache else kv).to(self.dtype)

    def compressed_kv(self, kv: Tensor) -> Tensor:
        """Compressed KV [..., head_dim] as it is cached: fp4 QDQ per 16 with e4m3 scales, ``dtype``."""
        return (qdq_fp4_e4m3(kv) if self.quantize_cache else kv).to(self.dtype)

    def index(self, x: Tensor) -> Tensor:
        """Index keys or queries [..., index_head_dim]: fp4 QDQ per 32 with ue8m0 scales, ``dtype``."""
        return (qdq_fp4_ue8m0(x) if self.quantize_cache else x).to(self.dtype)


NUMERICS = {
    "release": Numerics(torch.bfloat16, quantize_activations=True, quantize_cache=True),
    "fp32": Numerics(torch.float32, quantize_activations=False, quantize_cache=True),
    "fp32_no_qdq": Numerics(torch.float32, quantize_activations=False, quantize_cache=False),
}


def numerics_by_name(name: str) -> Numerics:
    """The arithmetic called ``name``: release, fp32 or fp32_no_qdq; raises RequestError for another name."""
    if name not in NUMERICS:
        raise RequestError(f"numerics: expected one of {', '.join(NUMERICS)}, found {name!r}")
    return NUMERICS[name]
