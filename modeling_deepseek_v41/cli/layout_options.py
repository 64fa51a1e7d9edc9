# SPDX-License-Identifier: Apache-2.0
"""The options that say how a model is divided among ranks, the same for every command."""

import argparse
from typing import Any

from ..config import ModelConfig
from ..layout import MESHES, O_PROJ_REDUCE, Layout, make_layout


def add_layout_arguments(parser: argparse.ArgumentParser, world_size: int | None, words: str) -> Any:
    """Adds the group "ranks" and returns it. ``world_size``: the default; ``words``: what --world-size means."""
    group = parser.add_argument_group("ranks")
    group.add_argument("--world-size", type=int, default=world_size, metavar="N", help=words)
    group.add_argument(
        "--attn-tp-degree",
        type=int,
        metavar="N",
        help="ranks of one attention group (default: as many as divide the ranks and o_groups)",
    )
    group.add_argument(
        "--moe-ep-degree",
        type=int,
        metavar="N",
        help="parts of the routed experts by id; each is split by columns over the ranks that are left (default: as many as"
        " divide the ranks and the experts)",
    )
    group.add_argument("--dspark-moe-ep-degree", type=int, metavar="N", help="the same for the drafter's experts")
    group.add_argument(
        "--o-proj-reduce",
        choices=O_PROJ_REDUCE,
        default="group",
        help="whether wo_b is split, and added up, within an attention group or over all ranks (default: group)",
    )
    group.add_argument(
        "--mesh",
        choices=MESHES,
        default="contiguous",
        help="which ranks are an attention group: neighbours, or what NxD Inference takes on a trn2.48xlarge (default:"
        " contiguous)",
    )
    return group


def ranks_in_words(layout: Layout) -> str:
    """``layout`` for people."""
    by_id, by_columns = layout.expert_degrees(False)
    drafter_by_id, drafter_by_columns = layout.expert_degrees(True)
    return (
        f"{layout.world_size} ranks: attention groups of {layout.attn_tp_degree}, wo_b reduced over the"
        f" {layout.o_proj_reduce}; experts {by_id} x {by_columns} (by id x by columns), the drafter's {drafter_by_id} x"
        f" {drafter_by_columns}; shared expert in {layout.shared_tp_degree} parts"
    )


def chosen_layout(args: argparse.Namespace, config: ModelConfig, world_size: int) -> Layout:
    """The division that ``args`` ask for; raises RequestError naming the degree that does not fit."""
    return make_layout(
        config, world_size, args.attn_tp_degree, args.moe_ep_degree, args.dspark_moe_ep_degree, args.o_proj_reduce, args.mesh
    )
