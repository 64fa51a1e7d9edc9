# SPDX-License-Identifier: Apache-2.0
"""How the weights of a layer's routed experts are kept: in one of three formats, all of which hold every stored value.

Source of fp8_exact: docs/kernels.md, section 4.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint.rank import Source
from .errors import CheckpointError, RequestError
from .formats import decode_fp4
from .fp8_exact import decode_rows, reencode
from .linear import frozen, room
from .numerics import Arithmetic

EXPERT_WEIGHT_FORMATS = ("bf16", "fp4_bytes", "fp8_exact")

ROWS_PER_EXCEPTION = 256
"""Unless told otherwise, fp8_exact has room for one exception in so many rows: 0.8 % more memory."""


class ExpertStorage(NamedTuple):
    """What a bank keeps. ``exception_rows``: fp8_exact's room for exceptions, in rows of each of a layer's two matrices."""

    format: str = "bf16"
    exception_rows: int | None = None

    def check(self) -> None:
        """Raises RequestError for an unknown format and for room that makes no sense."""
        name, rows = self
        if name not in EXPERT_WEIGHT_FORMATS:
            raise RequestError(f"expert_weight_format: expected one of {', '.join(EXPERT_WEIGHT_FORMATS)}, found {name!r}")
        if rows is not None and (name != "fp8_exact" or type(rows) is not int or rows < 1):
            raise RequestError(
                "expert_exception_rows: expected an integer of 1 or more, with expert_weight_format fp8_exact alone;"
                f" found {rows!r} with {name}"
            )


class Weight(NamedTuple):
    """One matrix of all experts of a bank, [E, n, k] in its format."""

    rows: Tensor
    """bf16: the values in the arithmetic's dtype; fp4_bytes: nibbles [E, n, k/2]; fp8_exact: codes of Trainium2's e4m3."""
    scale: Tensor | None = None
    """fp4_bytes: ue8m0 bytes [E, n, k/32]; fp8_exact: a power of two per row, bf16 [E, n]."""
    exceptions: Tensor | None = None
    """fp8_exact: the rows that do not fit, bf16 [C, k]; their codes are zeros."""
    places: Tensor | None = None
    """fp8_exact: where the exceptions belong, e * n + row, int32 [C]; -1 where there is none."""

    def of(self, expert: int) -> Tensor:
        """The values [n, k] of one expert: as kept in bf16, else decoded to fp32, exactly."""
        if self.scale is None:
            return self.rows[expert]
        if self.exceptions is None or self.places is None:
            return decode_fp4(self.rows[expert], self.scale[expert])
        values = decode_rows(self.rows[expert], self.scale[expert])
        put = put_chosen if values.device.type == "cpu" else put_static
        return put(values, self.places - expert * values.shape[0], self.exceptions)


def put_chosen(values: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """fp32 ``values`` [n, k] with ``rows`` [c, k] in their places ``index`` [c]; rows whose index is not in 0 to n - 1 are
    left out. In place, and shapes depend on ``index``: nothing is spent on other rows."""
    here = ((index >= 0) & (index < values.shape[0])).nonzero().flatten()
    return values.index_copy_(0, index[here].long(), rows[here].float())


def put_static(values: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``put_chosen`` for graphs, whose shapes depend on nothing: rows that are left out go to a spare one. Not in place."""
    n = values.shape[0]
    place = torch.where((index >= 0) & (index < n), index, n).long()
    return F.pad(values, (0, 0, 0, 1)).index_copy_(0, place, rows.float())[:n]


class ExpertBank(nn.Module):
    """The weights of all experts of a layer, w1 and w3 stacked: w13 [E, 2I, d], w2 [E, d, I].

    ``storage``: bf16 keeps them in the arithmetic's dtype, which holds every fp4 weight exactly; fp4_bytes keeps the stored
    bytes, a quarter of that; fp8_exact keeps fp8 codes with one scale per row, half of it, and the few rows that do not fit
    in bf16. The last two are decoded, expert by expert, at each use on the CPU. Parameters are w13 and w2 and, with
    ``_scale``, ``_exceptions`` and ``_places`` behind the name, the other fields of ``Weight``.
    ``whole``: whether all of each expert is here; of a part of its columns the result is a part of a sum and
    stays fp32. ``share``: what its results are multiplied by, where other ranks hold the same expert and add it up too.
    """

    w13: Tensor
    w2: Tensor

    def __init__(
        self, experts: int, d: int, inter: int, arithmetic: Arithmetic, storage: ExpertStorage, whole: bool = True,
        share: float = 1.0,
    ):  # fmt: skip
        super().__init__()
        storage.check()
        self.inter, self.arithmetic, self.storage, self.whole, self.share = inter, arithmetic, storage, whole, share
        for name, n, k in (("w13", 2 * inter, d), ("w2", d, inter)):
            if storage.format == "bf16":
                self.register_parameter(name, frozen(experts, n, k, dtype=arithmetic.dtype))
            elif storage.format == "fp4_bytes":
                self.register_parameter(name, frozen(experts, n, k // 2, dtype=torch.uint8))
                self.register_parameter(f"{name}_scale", frozen(experts, n, k // 32, dtype=torch.uint8))
            else:
                capacity = storage.exception_rows or -(-experts * n // ROWS_PER_EXCEPTION)
                self.register_parameter(name, frozen(experts, n, k, dtype=torch.uint8))
                self.register_parameter(f"{name}_scale", frozen(experts, n, dtype=torch.bfloat16))
                self.register_parameter(f"{name}_exceptions", frozen(capacity, k, dtype=torch.bfloat16))
                self.register_parameter(f"{name}_places", frozen(capacity, dtype=torch.int32))

    @property
    def tensors(self) -> list[Tensor]:
        """The fields of w13's ``Weight`` and then of w2's, those that the format has."""
        return [parameter for parameter in self._parameters.values() if parameter is not None]

    def exceptions(self) -> tuple[int, int]:
        """How many rows are kept in bf16 because fp8 cannot hold them, of how many."""
        w13, w2 = weights_of(self.tensors)
        rows = sum(weight.rows.shape[0] * weight.rows.shape[1] for weight in (w13, w2))
        return sum(int((weight.places >= 0).sum()) for weight in (w13, w2) if weight.places is not None), rows

    def load(self, checkpoint: Source, name: str) -> None:
        """Reads ``name``.{e}.{w1,w2,w3}.{weight,scale} of every expert; raises CheckpointError for too many exceptions."""
        for key in self._parameters:
            room(self, key)
        w13, w2 = _Filling(self.tensors[: len(self.tensors) // 2]), _Filling(self.tensors[len(self.tensors) // 2 :])
        for expert in range(self.w13.shape[0]):
            for part, filling, first in (("w1", w13, 0), ("w3", w13, self.inter), ("w2", w2, 0)):
                packed = checkpoint.tensor(f"{name}.{expert}.{part}.weight")
                filling.put(expert, first, packed, checkpoint.tensor(f"{name}.{expert}.{part}.scale"))
        for key, filling in (("w1 and w3", w13), ("w2", w2)):
            filling.check(f"{name}: {key}")


class _Filling:
    """A bank's matrix while it is loaded."""

    def __init__(self, tensors: list[Tensor]):
        self.weight = Weight(*tensors)
        self.found = 0
        if self.weight.exceptions is not None and self.weight.places is not None:
            self.weight.exceptions.zero_()
            self.weight.places.fill_(-1)

    def put(self, expert: int, first: int, packed: Tensor, scale: Tensor) -> None:
        """Keeps stored rows [n, k/2] with their scales [n, k/32] as rows ``first`` and on of ``expert``."""
        rows, scales, exceptions, places = self.weight
        stop = first + packed.shape[0]
        if scales is None:
            rows[expert, first:stop] = decode_fp4(packed, scale)
        elif exceptions is None or places is None:
            rows[expert, first:stop], scales[expert, first:stop] = packed, scale
        else:
            made = reencode(packed, scale)
            rows[expert, first:stop] = made.codes
            scales[expert, first:stop] = made.scale
            unfit = (~made.exact).nonzero().flatten()
            kept = unfit[: max(0, exceptions.shape[0] - self.found)]
            free = slice(self.found, self.found + len(kept))
            exceptions[free] = decode_fp4(packed[kept], scale[kept]).to(exceptions.dtype)
            places[free] = (expert * rows.shape[1] + first + kept).to(places.dtype)
            self.found += len(unfit)

    def check(self, name: str) -> None:
        """Raises CheckpointError where more rows do not fit than there is room for."""
        if self.weight.exceptions is not None and self.found > len(self.weight.exceptions):
            raise CheckpointError(
                f"{name}: {self.found} rows of this rank have values too far apart for one fp8 scale, but there is room for"
                f" {len(self.weight.exceptions)} of them (expert_exception_rows); give at least {self.found}, or choose"
                " expert_weight_format fp4_bytes"
            )


def weights_of(tensors: list[Tensor]) -> tuple[Weight, Weight]:
    """w13 and w2 of ``ExpertBank.tensors``."""
    half = len(tensors) // 2
    return Weight(*tensors[:half]), Weight(*tensors[half:])


def exceptions_of(model: nn.Module) -> tuple[int, int]:
    """How many rows of a loaded model's routed experts are kept in bf16 because fp8 cannot hold them, of how many."""
    counts = [bank.exceptions() for bank in model.modules() if isinstance(bank, ExpertBank) and bank.storage.format != "bf16"]
    return sum(found for found, _ in counts), sum(rows for _, rows in counts)
