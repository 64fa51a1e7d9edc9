# SPDX-License-Identifier: Apache-2.0
"""The operations that run as NKI kernels, and how a kernel is launched on a device.

How a model's tensors are laid out for each kernel is in nki_attention_ops.py, nki_expert_ops.py, nki_linear_ops.py,
nki_projection_ops.py and nki_row_ops.py, its weights in nki_layout.py. Importing this module needs no ``nki``; making the
operations does.
"""

import dataclasses
from typing import Any

from torch import Tensor

from .dispatch import TORCH
from .nki_attention_ops import AttentionKernels
from .nki_expert_ops import ExpertKernels
from .nki_launch import PARTITIONS, Launch
from .nki_layout import lay_out
from .nki_linear_ops import LinearKernels
from .nki_projection_ops import ProjectionKernels
from .nki_row_ops import RowKernels
from .operations import Operations


def on_device() -> Operations:
    """The kernels on the two physical cores of a Neuron device's logical core. Not verified on a device."""

    def launch(kernel: Any, *tensors: Tensor, cores: int = 2, **constants: Any) -> Any:
        return kernel[cores](*tensors, **constants)

    return nki_operations("nki", launch)


def nki_operations(name: str, launch: Launch) -> Operations:
    """The operations ``name``: ``launch`` runs the kernels. Raises ImportError without nki.

    Each keeps the contract of its PyTorch function. index_scores returns the same values in the arithmetic's dtype, for
    the search of top_ascending in bf16 takes half the steps.
    """
    rows, linears, projections = RowKernels(launch), LinearKernels(launch), ProjectionKernels(launch)
    attention, experts = AttentionKernels(launch), ExpertKernels(launch, linears, rows)
    return dataclasses.replace(
        TORCH,
        name=name,
        index_rows=PARTITIONS,
        lay_out=lay_out,
        linear=linears.linear,
        grouped=linears.grouped,
        query_projection=projections.query_projection,
        output_projection=projections.output_projection,
        quantised_linears=projections.quantised_linears,
        attend=attention.attend,
        attend_block=attention.attend_block,
        index_scores=attention.index_scores,
        top_ascending=attention.top_ascending,
        candidate_blocks=attention.candidate_blocks,
        quantise=linears.quantise,
        quantise_index=linears.quantise_index,
        quantise_compressed=linears.quantise_compressed,
        normalise=rows.normalise,
        rotate=rows.rotate,
        rotate_and_quantise=rows.rotate_and_quantise,
        sublayer_input=rows.sublayer_input,
        mixes=rows.mixes,
        collapse=rows.collapse,
        weighted_sum=rows.weighted_sum,
        expand=rows.expand,
        compress_pool=rows.compress_pool,
        engram_gate=rows.engram_gate,
        route=rows.route,
        route_and_share=experts.route_and_share,
        swiglu=rows.swiglu,
        shared_expert=experts.shared_expert,
        expert_rows=experts.experts,
        expert_by_expert=experts.experts,
        every_expert=experts.experts,
    )
