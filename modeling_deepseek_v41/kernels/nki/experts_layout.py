# SPDX-License-Identifier: Apache-2.0
"""On the host: expert weights from fp8_exact rows to the order in which the kernel streams them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import CheckpointError
from ...expert_bank import Weight
from ...fp8_exact import ExactRows
from .experts_plan import Plan, columns_per_core, plan


class PackedExpert(NamedTuple):
    """One expert for C cores; stacked over experts they are the kernel's operands. KW, W: Plan.hidden_width and width."""

    w13: Tensor
    """[C, max(KW, W), bytes] uint8: per partition the scales, bf16, of w1's, w3's and w2's rows, one per tile, and the pieces
    of w1 and w3, each [hidden / KW, 2, columns]."""
    w2: Tensor
    """[C, W, columns / W * hidden] uint8: per partition the pieces of w2, each [columns / W, hidden columns]."""


def pack(w1: ExactRows, w3: ExactRows, w2: ExactRows, cores: int) -> PackedExpert:
    """The layout for ``cores`` (1 or 2) of w1, w3 [inter, hidden] and w2 [hidden, inter].

    Every piece that the kernel loads is contiguous in its partition: at least 4 KiB at release shapes. Zero columns fill
    each core's share up to whole groups of 32. Raises CheckpointError where rows are not exact.
    """
    for name, rows in (("w1", w1), ("w3", w3), ("w2", w2)):
        if not rows.exact.all():
            count = int((~rows.exact).sum())
            raise CheckpointError(f"expert {name}: {count} of {len(rows.exact)} rows are not fp8_exact; keep it in bf16")
    inter, hidden = w1.codes.shape
    columns = columns_per_core(inter, cores)
    shape, fill = plan(hidden, columns, cores), columns * cores - inter
    gate, up = (F.pad(rows.codes, (0, 0, 0, fill)).view(cores, columns, hidden) for rows in (w1, w3))
    down = F.pad(w2.codes, (0, fill)).view(hidden, cores, columns)
    up_scales = [F.pad(rows.scale, (0, fill)).view(cores, columns) for rows in (w1, w3)]
    parts = []
    for core in range(cores):
        order = hidden_order(shape, core)
        scales = _scales([scale[core] for scale in up_scales], w2.scale[order], shape)
        weights = _up(torch.stack([gate[core], up[core]]), shape)
        weights = F.pad(weights, (0, 0, 0, len(scales) - len(weights)))
        parts.append(PackedExpert(torch.cat([scales, weights], 1), _down(down[order, core], shape)))
    return PackedExpert(*(torch.stack(list(tensors)) for tensors in zip(*parts, strict=True)))


def exact_rows(w13: Weight, w2: Weight, expert: int) -> tuple[ExactRows, ExactRows, ExactRows]:
    """w1, w3 and w2 of ``expert`` in a bank that is kept as fp8_exact."""
    up, down = (_rows(weight, expert) for weight in (w13, w2))
    inter = up.codes.shape[0] // 2
    return ExactRows(*(part[:inter] for part in up)), ExactRows(*(part[inter:] for part in up)), down


def _rows(weight: Weight, expert: int) -> ExactRows:
    assert weight.scale is not None and weight.places is not None
    codes, exact = weight.rows[expert], torch.ones(weight.rows.shape[:2], dtype=torch.bool)
    exact.view(-1)[weight.places[weight.places >= 0].long()] = False
    return ExactRows(codes, (torch.frexp(weight.scale[expert].float())[1] - 1).to(torch.int16), exact[expert])


def stack(experts: list[PackedExpert]) -> PackedExpert:
    """The operands of a layer: each tensor with the experts in front."""
    return PackedExpert(*(torch.stack(list(tensors)) for tensors in zip(*experts, strict=True)))


def hidden_order(shape: Plan, core: int) -> Tensor:
    """The order in which a core makes the hidden columns: on two cores the other's half, then its own."""
    halves = torch.arange(shape.hidden).view(shape.cores, -1)
    return halves.roll(-1 - core, 0).flatten()


def _up(codes: Tensor, shape: Plan) -> Tensor:
    """[2, columns, hidden] to [KW, bytes]: hidden column k * KW + p is on partition p."""
    by_partition = codes.view(2, shape.columns, shape.hidden_tiles, shape.hidden_width).permute(3, 2, 0, 1)
    pieces = by_partition.split([tiles * shape.width for tiles in shape.up_pieces], -1)
    return torch.cat([piece.flatten(1) for piece in pieces], 1)


def _down(codes: Tensor, shape: Plan) -> Tensor:
    """[hidden, columns] to [W, bytes]: column t * W + p is on partition p."""
    by_partition = codes.view(shape.hidden, shape.tiles, shape.width).permute(2, 1, 0)
    pieces = by_partition.split([tiles * shape.hidden_width for tiles in shape.down_pieces], -1)
    return torch.cat([piece.flatten(1) for piece in pieces], 1)


def _scales(up: list[Tensor], down: Tensor, shape: Plan) -> Tensor:
    """[max(KW, W), scale_bytes] uint8."""
    partitions = max(shape.width, shape.hidden_width)
    columns = [scale.view(-1, shape.width).T for scale in up] + [down.view(-1, shape.hidden_width).T]
    filled = torch.cat([F.pad(column, (0, 0, 0, partitions - column.shape[0])) for column in columns], 1)
    return filled.bfloat16().contiguous().view(torch.uint8)
