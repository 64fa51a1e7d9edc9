# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs: the only place that knows more than one."""

import dataclasses
import functools
import importlib.util

from torch import nn

from .. import attention, compressor, experts, formats, hyper_connections, indexer, linear, moe, projections, rope, rows, topk
from ..engram import layer as engram
from ..errors import RequestError
from .operations import Operations


def as_loaded(model: nn.Module) -> None:
    """Puts the weights of ``model``, filled, into the layout that the operations read. Once, when all are loaded; here as they
    are. Afterwards the model serves these operations alone and cannot be loaded or written again."""


TORCH = Operations(
    name="torch",
    index_rows=1,
    lay_out=as_loaded,
    linear=rows.linear,
    grouped=rows.grouped,
    query_projection=projections.query_projection,
    output_projection=projections.output_projection,
    quantised_linears=projections.quantised_linears,
    attend=attention.attend,
    attend_block=attention.attend_block,
    index_scores=indexer.index_scores,
    top_ascending=topk.top_ascending,
    candidate_blocks=indexer.candidate_blocks,
    quantise=linear.quantise,
    quantise_index=formats.qdq_fp4_ue8m0,
    quantise_compressed=formats.qdq_fp4_e4m3,
    normalise=linear.rms_norm,
    rotate=rope.rotate,
    rotate_and_quantise=rope.rotate_and_quantise,
    sublayer_input=hyper_connections.sublayer_input,
    mixes=hyper_connections.mixes,
    collapse=hyper_connections.collapse,
    weighted_sum=hyper_connections.weighted_sum,
    expand=hyper_connections.expand,
    compress_pool=compressor.compress_pool,
    engram_gate=engram.engram_gate,
    route=moe.route,
    route_and_share=moe.route_and_share,
    swiglu=experts.swiglu,
    shared_expert=experts.shared_expert,
    expert_rows=experts.expert_rows,
    expert_by_expert=experts.expert_by_expert,
    every_expert=experts.every_expert,
)
"""The reference: PyTorch on any device."""

KERNELS = ("auto", "torch", "numba", "nki")

_registered: dict[str, Operations] = {}


def register(ops: Operations) -> None:
    """Makes ``ops`` known under its name, one that is not taken: how a launcher of kernels other than the device's joins."""
    if ops.name in KERNELS or ops.name in _registered:
        raise RequestError(f"kernels: {ops.name!r} is taken; give the operations another name")
    _registered[ops.name] = ops


def operations(name: str) -> Operations:
    """The implementation called ``name``: torch, numba, nki, a registered one, or auto.

    numba compiles loops for the CPU that the process runs on: the same results up to the order of fp32 sums, many times
    fewer calls; auto is numba where it is installed and else torch. nki runs this package's kernels on a Neuron device.
    Raises RequestError for another name and where numba or nki is asked for and absent.
    """
    return _registered[name] if name in _registered else _known(name)


@functools.cache
def _known(name: str) -> Operations:
    if name not in KERNELS:
        raise RequestError(f"kernels: expected one of {', '.join((*KERNELS, *_registered))}, found {name!r}")
    if name == "nki":
        if importlib.util.find_spec("nki") is None:
            raise RequestError("kernels: nki is not installed; it is part of the AWS Neuron SDK; choose torch or numba")
        from .nki_ops import on_device

        return on_device()
    installed = importlib.util.find_spec("numba") is not None
    if name == "numba" and not installed:
        raise RequestError("kernels: numba is not installed; pip install numba, or choose torch")
    return TORCH if name == "torch" or not installed else _numba()


def _numba() -> Operations:
    from . import rowwise_ops as ops

    return dataclasses.replace(
        TORCH,
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
        shared_expert=ops.shared_expert,
        expert_rows=ops.expert_rows,
    )
