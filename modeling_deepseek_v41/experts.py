# SPDX-License-Identifier: Apache-2.0
"""The experts' storage, and the operation over them that reads the chosen experts only.

``local_experts`` is one operation to a graph: which experts it reads is decided inside, as a kernel would, so the model
around it reads nothing on the host (docs/model.md, section 7).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint.rank import Source
from .errors import CheckpointError, RequestError
from .formats import decode_fp4
from .fp8_exact import reencode
from .kernels.nki.experts_layout import pack, shapes
from .linear import fill, frozen, sigmoid
from .numerics import Arithmetic

EXPERT_STORAGE = ("decoded", "bytes", "fp8_exact")


class ExpertBank(nn.Module):
    """The weights of all experts of a layer, w1 and w3 stacked: w13 [E, 2I, d], w2 [E, d, I].

    ``decoded`` keeps them in the arithmetic's dtype, which holds every fp4 weight exactly; ``bytes`` keeps the stored
    nibbles [E, n, k/2] and scales [E, n, k/32] (uint8) and decodes the chosen experts at each use: a quarter of the
    memory, slower. ``fp8_exact`` keeps what the experts kernel streams (kernels/nki/experts_layout.py), uint8 [E, cores, ...]:
    a share of the columns for two cores, a whole expert for one, since its result is rounded before the sum. ``whole``:
    whether all of each expert is here; of a part of its columns the result is a part of a sum and stays fp32. ``share``:
    what its results are multiplied by, where other ranks hold the same expert and add it up too.
    """

    def __init__(
        self, experts: int, d: int, inter: int, arithmetic: Arithmetic, storage: str, whole: bool = True, share: float = 1.0
    ):
        super().__init__()
        if storage not in EXPERT_STORAGE:
            raise RequestError(f"expert_storage: expected one of {', '.join(EXPERT_STORAGE)}, found {storage!r}")
        self.inter, self.arithmetic, self.whole, self.share = inter, arithmetic, whole, share
        self.cores = (1 if whole else 2) if storage == "fp8_exact" else 0
        if self.cores:
            _check_fp8_exact(d, self.cores, arithmetic)
            first, second = shapes(d, inter, self.cores)
            self.w13, self.w2 = (frozen(experts, *shape, dtype=torch.uint8) for shape in (first, second))
            self.w13_scale = self.w2_scale = None
            return
        as_bytes = storage == "bytes"
        pack, kind = (2, torch.uint8) if as_bytes else (1, arithmetic.dtype)
        self.w13 = frozen(experts, 2 * inter, d // pack, dtype=kind)
        self.w2 = frozen(experts, d, inter // pack, dtype=kind)
        self.w13_scale = frozen(experts, 2 * inter, d // 32, dtype=torch.uint8) if as_bytes else None
        self.w2_scale = frozen(experts, d, inter // 32, dtype=torch.uint8) if as_bytes else None

    @property
    def tensors(self) -> list[Tensor]:
        """w13 and w2, each followed by its scales where they are kept as bytes."""
        return [tensor for tensor in (self.w13, self.w13_scale, self.w2, self.w2_scale) if tensor is not None]

    def load(self, checkpoint: Source, name: str) -> None:
        """Reads ``name``.{e}.{w1,w2,w3}.{weight,scale} of every expert."""
        for key, parameter in list(self.named_parameters()):
            fill(self, key, torch.empty(parameter.shape, dtype=parameter.dtype))
        if self.cores:
            self._load_fp8_exact(checkpoint, name)
            return
        for expert in range(self.w13.shape[0]):
            for part, weights, scales in (
                ("w1", self.w13[expert, : self.inter], self._scales(self.w13_scale, expert, slice(self.inter))),
                ("w3", self.w13[expert, self.inter :], self._scales(self.w13_scale, expert, slice(self.inter, None))),
                ("w2", self.w2[expert], self._scales(self.w2_scale, expert, slice(None))),
            ):
                packed = checkpoint.tensor(f"{name}.{expert}.{part}.weight")
                scale = checkpoint.tensor(f"{name}.{expert}.{part}.scale")
                if scales is None:
                    weights.copy_(decode_fp4(packed, scale))
                else:
                    weights.copy_(packed)
                    scales.copy_(scale)

    def _load_fp8_exact(self, checkpoint: Source, name: str) -> None:
        for expert in range(self.w13.shape[0]):
            key = f"{name}.{expert}"
            parts = (f"{key}.{part}" for part in ("w1", "w3", "w2"))
            w1, w3, w2 = (reencode(checkpoint.tensor(f"{part}.weight"), checkpoint.tensor(f"{part}.scale")) for part in parts)
            try:
                packed = pack(w1, w3, w2, self.cores)
            except CheckpointError as error:
                raise CheckpointError(f"{key}: {error}; expert_storage='decoded' holds every weight") from error
            self.w13[expert], self.w2[expert] = packed

    @staticmethod
    def _scales(scales: Tensor | None, expert: int, rows: slice) -> Tensor | None:
        return None if scales is None else scales[expert, rows]


def _check_fp8_exact(d: int, cores: int, arithmetic: Arithmetic) -> None:
    """Whether a kernel reads this layout, and can."""
    if not arithmetic.ops.packed_experts or arithmetic.dtype != torch.bfloat16:
        found = f"kernels {arithmetic.ops.name!r}, {arithmetic.dtype}"
        raise RequestError(f"expert_storage: fp8_exact is read by the NKI kernels in release numerics only, found {found}")
    if d % (32 * cores):
        raise RequestError(f"expert_storage: fp8_exact needs a hidden_size that {32 * cores} divides, found {d}")


def swiglu(gate_up: Tensor, routing: Tensor | None, limit: float, arithmetic: Arithmetic) -> Tensor:
    """The input of w2: gate, up = halves of gate_up [..., 2I] fp32; silu(gate) * up * routing [...], rounded, fp8 QDQ.

    gate is clamped from above and up on both sides to ``limit``; 0 means no clamp. No ``routing`` means 1.
    """
    gate, up = gate_up.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    h = gate * sigmoid(gate) * up
    if routing is not None:
        h = h * routing.unsqueeze(-1)
    return arithmetic.activation(arithmetic.round(h))


_LIBRARY = torch.library.Library("deepseek_v41", "DEF")
_LIBRARY.define(
    "local_experts(Tensor x, Tensor ids, Tensor weights, Tensor[] bank, bool whole, Tensor[] shared, bool shared_whole,"
    " float share, float limit, ScalarType dtype, bool quantize, int exact_tokens, str kernels) -> Tensor"
)


def local_experts(x: Tensor, ids: Tensor, weights: Tensor, bank: ExpertBank, shared: ExpertBank, limit: float) -> Tensor:
    """Each row's chosen experts, weighted, and the ``shared`` one: x [B, T, d] fp32, ids, weights [B, T, k] to [B, T, d] fp32.

    An id of E, the bank's number of experts, is another rank's expert and adds nothing.
    Per expert: gate, up = x W13^T rounded to the arithmetic's dtype, h = silu(gate) * up * routing weight, rounded, fp8
    QDQ where the arithmetic asks for it, y = h W2^T rounded; summed in fp32. x has passed that QDQ already. Rows of decode
    (T <= exact_tokens) run one by one.
    """
    a = bank.arithmetic
    return torch.ops.deepseek_v41.local_experts(
        x, ids, weights, bank.tensors, bank.whole, shared.tensors, shared.whole, shared.share, limit,
        a.dtype, a.quantize_activations, a.exact_tokens, a.ops.name,
    )  # fmt: skip


@torch.library.impl(_LIBRARY, "local_experts", "CPU")
def _local_experts(
    x: Tensor, ids: Tensor, weights: Tensor, bank: list[Tensor], whole: bool, shared: list[Tensor], shared_whole: bool,
    share: float, limit: float, dtype: torch.dtype, quantize: bool, exact_tokens: int, kernels: str,
) -> Tensor:  # fmt: skip
    from .kernels.dispatch import operations

    arithmetic = Arithmetic(dtype, quantize, quantize, ops=operations(kernels), exact_tokens=exact_tokens)
    rows, chosen, routing = x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)
    run = arithmetic.ops.expert_rows if x.shape[1] <= exact_tokens else arithmetic.ops.expert_by_expert
    banks = as_bank(bank, whole), as_bank(shared, shared_whole, share)
    return run(rows, chosen, routing, *banks, limit, arithmetic).view(x.shape)


@torch.library.impl(_LIBRARY, "local_experts", "CompositeExplicitAutograd")
def _traced_experts(
    x: Tensor, ids: Tensor, weights: Tensor, bank: list[Tensor], whole: bool, shared: list[Tensor], shared_whole: bool,
    share: float, limit: float, dtype: torch.dtype, quantize: bool, exact_tokens: int, kernels: str,
) -> Tensor:  # fmt: skip
    """Wherever a tensor cannot be read to choose experts by it: every expert of the bank over all rows, with weight 0 where
    it was not chosen, an expert at a time."""
    from .kernels.dispatch import operations

    arithmetic = Arithmetic(dtype, quantize, quantize, ops=operations(kernels), exact_tokens=exact_tokens)
    rows, experts = x.flatten(0, 1), as_bank(bank, whole)
    count = experts.w13.shape[0]
    routing = x.new_zeros(rows.shape[0], count + 1).scatter(1, ids.flatten(0, 1), weights.flatten(0, 1))
    out = one_expert(rows, 0, None, as_bank(shared, shared_whole, share), limit, arithmetic)
    for expert in range(count):
        out = out + one_expert(rows, expert, routing[:, expert], experts, limit, arithmetic)
    return out.view(x.shape)


@torch.library.register_fake("deepseek_v41::local_experts", lib=_LIBRARY)
def _shape(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


class Bank(NamedTuple):
    """The tensors and facts of an ``ExpertBank``; scales where the weights are kept as bytes."""

    w13: Tensor
    w13_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None
    whole: bool
    share: float

    @property
    def packed(self) -> bool:
        """Whether the weights are kept as fp8_exact, for the experts kernel."""
        return self.w13.ndim == 4

    def round(self, y: Tensor, arithmetic: Arithmetic) -> Tensor:
        """Results of w2, rounded where they are whole."""
        return arithmetic.round(y) if self.whole else y


def as_bank(tensors: list[Tensor], whole: bool, share: float = 1.0) -> Bank:
    """The inverse of ``ExpertBank.tensors``."""
    if len(tensors) == 2:
        return Bank(tensors[0], None, tensors[1], None, whole, share)
    w13, w13_scale, w2, w2_scale = tensors
    return Bank(w13, w13_scale, w2, w2_scale, whole, share)


def _weight(weights: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    return weights[expert] if scales is None else decode_fp4(weights[expert], scales[expert])


def expert_rows(
    x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Bank, limit: float, arithmetic: Arithmetic
) -> Tensor:
    """The chosen and the shared expert's sum a row at a time: x [n, d], ids and routing [n, k] to [n, d]."""
    experts, sums = bank.w13.shape[0], []
    for row, row_ids in enumerate(ids.tolist()):
        token, weights = x[row : row + 1], routing[row]
        y = one_row(token, [0], routing.new_ones(1), shared, limit, arithmetic)
        if max(row_ids) == experts:
            weights = weights[ids[row] < experts]
            row_ids = [expert for expert in row_ids if expert < experts]
        if row_ids:
            y = one_row(token, row_ids, weights, bank, limit, arithmetic) + y
        sums.append(y)
    return torch.cat(sums)


def one_row(x: Tensor, ids: list[int], routing: Tensor, bank: Bank, limit: float, arithmetic: Arithmetic) -> Tensor:
    """Experts ``ids`` of one row [1, d], weighted with routing [len(ids)]: the sum [1, d]."""
    w13, s13, w2, s2, _, share = bank
    token = x.to(w13.dtype if s13 is None else torch.float32)
    gate_up = torch.cat([F.linear(token, _weight(w13, s13, expert)) for expert in ids])
    h = arithmetic.ops.swiglu(arithmetic.round(gate_up), routing, limit, arithmetic)
    h = h.to(token.dtype) if bank.whole else h  # a matrix product in bf16 would round what is only a part of a sum
    y = torch.cat([F.linear(h[i : i + 1], _weight(w2, s2, expert).to(h.dtype)) for i, expert in enumerate(ids)])
    return bank.round(y, arithmetic).sum(0, keepdim=True) * share


def expert_by_expert(
    x: Tensor, ids: Tensor, routing: Tensor, bank: Bank, shared: Bank, limit: float, arithmetic: Arithmetic
) -> Tensor:
    """The same an expert at a time, over all the rows that chose it: the fp32 sums come in another order."""
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=bank.w13.shape[0] + 1).tolist()
    out = torch.zeros_like(x)
    for expert, places in enumerate(order.split(counts)[:-1]):
        if counts[expert]:
            rows = places // k
            out.index_add_(0, rows, one_expert(x[rows], expert, routing.flatten()[places], bank, limit, arithmetic))
    return out.add_(one_expert(x, 0, None, shared, limit, arithmetic))


def one_expert(x: Tensor, expert: int, routing: Tensor | None, bank: Bank, limit: float, arithmetic: Arithmetic) -> Tensor:
    """One expert of rows [n, d], weighted with routing [n], or not: [n, d]."""
    w13, s13, w2, s2, _, share = bank
    gate_up = arithmetic.round(F.linear(x, _weight(w13, s13, expert).float()))
    h = arithmetic.ops.swiglu(gate_up, routing, limit, arithmetic)
    return bank.round(F.linear(h, _weight(w2, s2, expert).float()), arithmetic) * share
