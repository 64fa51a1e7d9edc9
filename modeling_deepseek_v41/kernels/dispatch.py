# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs: the only place that knows more than one."""

import functools
import importlib.util

from .. import attention, experts, formats, hyper_connections, indexer, linear, moe, rope, rows, topk
from ..errors import RequestError
from .operations import Operations

TORCH = Operations(
    name="torch",
    linear=rows.linear,
    grouped=rows.grouped,
    attend=attention.attend,
    attend_block=attention.attend_block,
    index_scores=indexer.index_scores,
    top_ascending=topk.top_ascending,
    quantise=formats.qdq_fp8,
    quantise_index=formats.qdq_fp4_ue8m0,
    normalise=linear.rms_norm,
    rotate=rope.rotate,
    mixes=hyper_connections.mixes,
    collapse=hyper_connections.collapse,
    expand=hyper_connections.expand,
    route=moe.route,
    swiglu=experts.swiglu,
    expert_rows=experts.expert_rows,
)
"""The reference: PyTorch on any device."""

KERNELS = ("auto", "torch", "numba")


@functools.cache
def operations(name: str) -> Operations:
    """The implementation called ``name``: torch, numba, or auto, which is numba where it is installed and else torch.

    numba compiles loops for the CPU that the process runs on: the same results up to the order of fp32 sums, many times
    fewer calls. Raises RequestError for another name and where numba is asked for and absent.
    """
    if name not in KERNELS:
        raise RequestError(f"kernels: expected one of {', '.join(KERNELS)}, found {name!r}")
    installed = importlib.util.find_spec("numba") is not None
    if name == "numba" and not installed:
        raise RequestError("kernels: numba is not installed; pip install numba, or choose torch")
    return TORCH if name == "torch" or not installed else _numba()


def _numba() -> Operations:
    from . import rowwise_ops as ops

    return Operations(
        name="numba",
        linear=ops.linear,
        grouped=ops.grouped,
        attend=ops.attend,
        attend_block=ops.attend_block,
        index_scores=ops.index_scores,
        top_ascending=ops.top_ascending,
        quantise=ops.quantise,
        quantise_index=ops.quantise_index,
        normalise=ops.normalise,
        rotate=ops.rotate,
        mixes=ops.mixes,
        collapse=ops.collapse,
        expand=ops.expand,
        route=ops.route,
        swiglu=ops.swiglu,
        expert_rows=ops.expert_rows,
    )
