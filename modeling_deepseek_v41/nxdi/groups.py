# SPDX-License-Identifier: Apache-2.0
"""The ranks of an NxDI run: their layout on the device's mesh, and the groups that exchange tensors in a graph or on a CPU."""

import functools
import math

import torch
from neuronx_distributed.parallel_layers.mappings import _gather_along_dim, reduce_from_tensor_model_parallel_region
from neuronx_distributed.utils import cpu_mode
from neuronx_distributed_inference.modules.attention.attention_process_groups import get_tp_cp_group_mesh
from torch import Tensor

from ..config import ModelConfig
from ..layout import Layout, Mesh, make_layout
from ..parallel import Group, Parallel, connect, unconnected
from .config import DeepseekV41NeuronConfig


def run_layout(config: ModelConfig, run: DeepseekV41NeuronConfig) -> Layout:
    """Who holds what in a run of tp_degree ranks; raises RequestError naming the degree that does not fit.

    The attention groups are NxDI's for the device (on a trn2 not all neighbours). moe_tp_degree 1 and moe_ep_degree 1, which
    NxDI's parser always passes, mean the default: experts by id over all ranks.
    """
    world = run.tp_degree
    attention = run.attn_tp_degree or math.gcd(world, config.o_groups)
    by_id = None if run.moe_tp_degree == run.moe_ep_degree == 1 else run.moe_ep_degree
    mesh = get_tp_cp_group_mesh(world, world // attention, run.switch_cc) if world % attention == 0 else "contiguous"
    return make_layout(config, world, attention, by_id, run.dspark_moe_ep_degree, run.o_proj_reduce, mesh)


class GraphGroup(Group):
    """Ranks that exchange tensors inside a traced graph, through NxD's collectives."""

    def __init__(self, mesh: Mesh):
        ranks = [list(row) for row in mesh]
        super().__init__(mesh, torch.distributed.new_group(ranks[0], pg_options={"xla_pg_options": {"mesh": ranks}}))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' ``x``; in which order it is added up is the device's."""
        return reduce_from_tensor_model_parallel_region(x, process_group=self.process_group)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` [...] in the order of their places: [size, ...]."""
        return _gather_along_dim(x.unsqueeze(0), 0, process_group=self.process_group)


def run_parallel(layout: Layout) -> Parallel:
    """``layout`` with the groups of this process: torch.distributed's on a CPU, NxD's where a graph is traced."""
    if layout.world_size == 1:
        return unconnected(layout, 0)
    if cpu_mode():
        return _connected(layout)
    return Parallel(layout, 0, GraphGroup((tuple(range(layout.world_size)),)), GraphGroup(layout.mesh))


@functools.cache
def _connected(layout: Layout) -> Parallel:
    """Process groups of one layout are made once per process."""
    return connect(layout)
