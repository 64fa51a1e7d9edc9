# SPDX-License-Identifier: Apache-2.0
"""nki.isa: the instructions, by kind. Signatures are those of the documentation's stubs (tests compare them)."""

from typing import Any

from ..enums import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from ..rules import RuleError as NkiValidationError
from ..tensor import Register as VirtualRegister
from .control import core_barrier, register_alloc, register_load, register_move, register_store, sendrecv
from .dma import dma_copy
from .elementwise import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from .gpsimd import affine_select, iota, nc_n_gather, nonzero_with_count
from .reduction import (
    activation,
    activation_reduce,
    select_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from .search import max8, nc_find_index8, nc_match_replace8
from .tensor_engine import nc_matmul, nc_transpose

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown

INSTRUCTIONS = (
    activation, activation_reduce, affine_select, core_barrier, dma_copy, iota, max8, memset,
    nc_find_index8, nc_match_replace8, nc_matmul, nc_n_gather, nc_transpose, nonzero_with_count,
    reciprocal, register_alloc, register_load, register_move, register_store, scalar_tensor_tensor,
    select_reduce, sendrecv, tensor_copy, tensor_copy_predicated, tensor_reduce, tensor_scalar,
    tensor_scalar_cumulative, tensor_scalar_reduce, tensor_tensor, tensor_tensor_scan,
)  # fmt: skip
"""Every instruction of the emulator."""

__all__ = [
    *(function.__name__ for function in INSTRUCTIONS),
    "NkiValidationError", "VirtualRegister", "dge_mode", "dma_engine", "engine", "get_nc_version", "gpsimd_engine",
    "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd", "scalar_engine", "tensor_engine", "unknown_engine",
    "vector_engine",
]  # fmt: skip


def get_nc_version() -> nc_version:
    """trn2."""
    return nc_version.gen3


def __getattr__(name: str) -> Any:
    raise AttributeError(f"nki.isa.{name}: the emulator does not have it (trn3 only, or no kernel here needs it)")
