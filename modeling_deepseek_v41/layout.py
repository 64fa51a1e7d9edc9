# SPDX-License-Identifier: Apache-2.0
"""Who holds what: how the model is divided among the ranks, as data that is checked once.

Attention is split over groups of ``attn_tp_degree`` ranks and repeated in every group; experts are split by id and then by
columns over the world; vocabulary and engram rows are split over the world; everything else is on every rank.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from .config import QDQ_GROUP, ModelConfig
from .errors import RequestError
from .state import GROUP_TILE

O_PROJ_REDUCE = ("group", "world")
MESHES = ("contiguous", "trn2")

Mesh = tuple[tuple[int, ...], ...]
"""Groups of world ranks, every rank in one of them; a rank's place in its group is its place in the row."""


class Split(NamedTuple):
    """One way to divide a dimension: into how many parts, and which part each world rank holds."""

    parts: int
    places: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A division that is known to fit its model: see ``make_layout``, which checks it. The default is one process.

    mesh: the attention groups. moe_ep_degree: parts of the routed experts by id; each part is split again into
    moe_tp_degree = world_size / moe_ep_degree parts by intermediate columns; the drafter's experts have a degree of their own.
    shared_tp_degree: parts of the shared expert by columns. o_proj_reduce: whether wo_b is split within each attention group
    or over the world.
    """

    world_size: int = 1
    mesh: Mesh = ((0,),)
    moe_ep_degree: int = 1
    dspark_moe_ep_degree: int = 1
    shared_tp_degree: int = 1
    o_proj_reduce: str = "group"

    @property
    def attn_tp_degree(self) -> int:
        """Ranks of one attention group."""
        return len(self.mesh[0])

    def expert_degrees(self, is_drafter: bool) -> tuple[int, int]:
        """(parts by expert id, parts by columns) of a backbone layer or a drafter stage."""
        by_id = self.dspark_moe_ep_degree if is_drafter else self.moe_ep_degree
        return by_id, self.world_size // by_id

    @property
    def splits_an_expert(self) -> bool:
        """Whether some expert's columns are on several ranks: its result is a sum then, which is not rounded by itself."""
        columns = (self.expert_degrees(is_drafter)[1] for is_drafter in (False, True))
        return self.shared_tp_degree > 1 or any(parts > 1 for parts in columns)

    def split(self, name: str) -> Split:
        """The division called ``name``; shard_plan.py says what each is used for.

        world: one part per rank. attention: by place in the attention group. o_proj: as attention, or, where wo_b is reduced
        over the world, each place's part divided again among the groups. shared: the first shared_tp_degree places of a
        group, again and again. experts and expert_columns, with dspark_ before them for the drafter: by id and by columns.
        """
        ranks = range(self.world_size)
        if name == "world":
            return Split(self.world_size, tuple(ranks))
        if name.endswith(("experts", "expert_columns")):
            by_id, by_columns = self.expert_degrees(name.startswith("dspark_"))
            if name.endswith("experts"):
                return Split(by_id, tuple(rank // by_columns for rank in ranks))
            return Split(by_columns, tuple(rank % by_columns for rank in ranks))
        where = {rank: (number, place) for number, row in enumerate(self.mesh) for place, rank in enumerate(row)}
        if name == "o_proj" and self.o_proj_reduce == "world":
            groups = len(self.mesh)
            return Split(self.world_size, tuple(where[rank][1] * groups + where[rank][0] for rank in ranks))
        parts = self.shared_tp_degree if name == "shared" else self.attn_tp_degree
        return Split(parts, tuple(where[rank][1] % parts for rank in ranks))

    @property
    def group_numbers(self) -> tuple[int, ...]:
        """Every world rank's attention group, its row in the mesh."""
        rows = {rank: number for number, row in enumerate(self.mesh) for rank in row}
        return tuple(rows[rank] for rank in range(self.world_size))


def contiguous_mesh(world_size: int, degree: int) -> Mesh:
    """Groups of ``degree`` neighbouring ranks."""
    return tuple(tuple(range(first, first + degree)) for first in range(0, world_size, degree))


def trn2_mesh(world_size: int, degree: int) -> Mesh:
    """NxD Inference's groups on a trn2.48xlarge: of 64 ranks, eight groups of 8 along the device's links; else neighbours."""
    if (world_size, degree) != (64, 8):
        return contiguous_mesh(world_size, degree)
    rows = []
    for first in range(0, 64, 16):
        rows.append((*range(first, first + 4), *range(first + 12, first + 16)))
        rows.append(tuple(range(first + 4, first + 12)))
    return tuple(rows)


def make_layout(
    config: ModelConfig,
    world_size: int,
    attn_tp_degree: int | None = None,
    moe_ep_degree: int | None = None,
    dspark_moe_ep_degree: int | None = None,
    o_proj_reduce: str = "group",
    mesh: Sequence[Sequence[int]] | str = "contiguous",
) -> Layout:
    """The division of ``config``'s model among ``world_size`` ranks; raises RequestError naming the degree that does not fit.

    By default as many attention groups, and as many parts of the experts by id, as the model and the world allow: for the
    release on 64 ranks attn_tp_degree 8, moe_ep_degree 64 and dspark_moe_ep_degree 64. ``mesh``: the attention groups' ranks,
    ascending in each, or the name of one: contiguous, neighbours, or trn2, which NxD Inference uses there. The shared
    expert is split as far as the attention group and whole groups of 32 columns, which share a scale, allow.
    """
    _require(_is_degree(world_size), f"world_size: expected an integer of 1 or more, found {world_size!r}")
    attention = math.gcd(world_size, config.o_groups) if attn_tp_degree is None else attn_tp_degree
    _check_divides("attn_tp_degree", attention, {"world_size": world_size, f"o_groups of {config.source}": config.o_groups})
    _check_attention(config, attention)
    rows = _rows(mesh, world_size, attention)
    _require(
        o_proj_reduce in O_PROJ_REDUCE, f"o_proj_reduce: expected one of {', '.join(O_PROJ_REDUCE)}, found {o_proj_reduce!r}"
    )
    width = config.o_groups * config.o_lora_rank
    _require(
        o_proj_reduce == "group" or width % world_size == 0,
        f"o_proj_reduce world: world_size {world_size} does not divide the {width} columns of wo_b (o_groups x o_lora_rank of"
        f" {config.source}); choose group",
    )
    by_id = _expert_degree(config, world_size, "moe_ep_degree", moe_ep_degree, is_drafter=False)
    drafter_by_id = _expert_degree(config, world_size, "dspark_moe_ep_degree", dspark_moe_ep_degree, is_drafter=True)
    shared = math.gcd(attention, config.moe_intermediate_size // QDQ_GROUP)
    return Layout(world_size, rows, by_id, drafter_by_id, shared, o_proj_reduce)


def _check_attention(config: ModelConfig, degree: int) -> None:
    part = config.o_groups // degree * config.o_lora_rank
    _require(
        part % QDQ_GROUP == 0,
        f"attn_tp_degree: {degree} leaves {part} columns of wo_b per rank (o_groups / {degree} x o_lora_rank of"
        f" {config.source}), expected a multiple of {QDQ_GROUP}, which share a scale",
    )
    block = config.candidate_block_size if config.candidate_source_layer_id >= 0 else 1
    _require(
        degree == 1 or (GROUP_TILE % degree == 0 and GROUP_TILE // degree % block == 0),
        f"attn_tp_degree: {degree} does not divide {GROUP_TILE} compressed positions into parts of whole candidate blocks"
        f" (candidate_block_size {block} of {config.source})",
    )


def _rows(named: Sequence[Sequence[int]] | str, world_size: int, degree: int) -> Mesh:
    if isinstance(named, str):
        _require(named in MESHES, f"mesh: expected one of {', '.join(MESHES)}, or groups of ranks, found {named!r}")
        return trn2_mesh(world_size, degree) if named == "trn2" else contiguous_mesh(world_size, degree)
    mesh = tuple(tuple(row) for row in named)
    ranks = sorted(rank for row in mesh for rank in row)
    _require(ranks == list(range(world_size)), f"mesh: expected every rank from 0 to {world_size - 1} once, found {mesh}")
    for row in mesh:
        _require(
            len(row) == degree and list(row) == sorted(row),
            f"mesh: expected groups of {degree} ranks in ascending order, as process groups number them, found {list(row)}",
        )
    return mesh


def _expert_degree(config: ModelConfig, world_size: int, name: str, degree: int | None, is_drafter: bool) -> int:
    experts, _ = config.experts(is_drafter)
    if is_drafter and not config.num_nextn_predict_layers:
        return world_size
    by_id = math.gcd(world_size, experts) if degree is None else degree
    routed = "dspark_n_routed_experts" if is_drafter else "n_routed_experts"
    _check_divides(name, by_id, {"world_size": world_size, f"{routed} of {config.source}": experts})
    by_columns, groups = world_size // by_id, config.moe_intermediate_size // QDQ_GROUP
    _require(
        groups % by_columns == 0,
        f"{name}: {by_id} splits every expert {by_columns} ways, but moe_intermediate_size {config.moe_intermediate_size} of"
        f" {config.source} has {groups} groups of {QDQ_GROUP} columns, which share a scale",
    )
    return by_id


def _check_divides(name: str, degree: object, numbers: dict[str, int]) -> None:
    _require(_is_degree(degree), f"{name}: expected an integer of 1 or more, found {degree!r}")
    for what, number in numbers.items():
        _require(number % degree == 0, f"{name}: {degree} does not divide {what}, which is {number}")  # type: ignore[operator]


def _is_degree(value: object) -> bool:
    return type(value) is int and value >= 1


def _require(good: bool, message: str) -> None:
    if not good:
        raise RequestError(message)
