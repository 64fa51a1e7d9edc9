# SPDX-License-Identifier: Apache-2.0
"""From logits to token ids: temperature, top-k, top-p and the draw, every row by itself.

The functions read nothing on the host. A row's bits depend on its own logits and options only: rows are computed one
after another, each in tensors of its own.
"""

import dataclasses

import torch
from torch import Tensor

from .errors import RequestError
from .topk import top_positions

LEAST_TEMPERATURE = 1e-6
"""Below it, logits divided by the temperature may leave fp32; greedy is meant."""


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How one request chooses its tokens.

    temperature: 0 is greedy, else logits are divided by it. top_k: keep the k most probable tokens, 0 is off. top_p: keep
    the fewest tokens that have this share of what top_k left, 1 is off. seed: of the request's own random numbers; None
    takes a new one. Raises RequestError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        heat = self.temperature
        good = _is_number(heat) and (heat == 0 or LEAST_TEMPERATURE <= heat <= 1 / LEAST_TEMPERATURE)
        _require(good, "temperature", f"a number, 0 (greedy) or {LEAST_TEMPERATURE:g} to {1 / LEAST_TEMPERATURE:g}", heat)
        good = _is_integer(self.top_k) and 0 <= self.top_k < 2**31
        _require(good, "top_k", f"an integer from 0 (off) to {2**31 - 1}", self.top_k)
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1 (off)", self.top_p)
        good = self.seed is None or (_is_integer(self.seed) and 0 <= self.seed < 2**63)
        _require(good, "seed", f"an integer from 0 to {2**63 - 1}", self.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0

    def generator(self) -> torch.Generator:
        """The request's own source of random numbers, on the CPU."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of every row: logits [B, V] fp32 to ids [B] int64; equal logits by lower id."""
    return top_positions(logits, 1).squeeze(-1)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, uniform: Tensor) -> Tensor:
    """One token per row from ``probabilities``: logits [B, V] and ``uniform`` [B] in [0, 1) to ids [B] int64."""
    return draw(probabilities(logits, temperature, top_k, top_p), uniform)


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None) -> Tensor:
    """The distribution that ``sample`` draws from: logits [B, V] fp32 to [B, V] fp32, each row summing to 1.

    ``temperature`` [B], 0 puts everything on the greedy token; then ``top_k`` [B] int (0 is off) keeps the most probable
    tokens, then ``top_p`` [B] (1 is off) the fewest of those, from the most probable on, that have that share of them.
    What is left is renormalised. Equal probabilities rank by lower id. None is off for all rows, and cheaper: the ranking
    of the vocabulary is left out. A row's result is the same to the bit either way.
    """
    batch, vocab = logits.shape
    off_k = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    off_p = torch.ones(batch, dtype=torch.float64, device=logits.device)
    restricted = top_k is not None or top_p is not None
    ks, ps = (off_k if top_k is None else top_k), (off_p if top_p is None else top_p)
    rows = []
    for row, temp, k, p in zip(logits.float(), temperature, ks, ps, strict=True):
        is_greedy = temp == 0
        scaled = (row - row.amax()) / torch.where(is_greedy, 1.0, temp)
        kept = scaled.softmax(-1)
        if restricted:
            kept = _restrict(kept, top_positions(row, vocab), k, p)
        share = (kept.double() / kept.double().sum()).float()
        best = torch.zeros_like(share).scatter(-1, top_positions(row, 1), 1.0)
        rows.append(torch.where(is_greedy, best, share))
    return torch.stack(rows)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF in fp64: ``probs`` [B, V] (need not sum to 1) and ``uniform`` [B] in [0, 1) to ids [B] int64.

    Token i is drawn where the mass before it is at most u times the row's whole mass, and the mass up to it is more.
    A token of probability 0 is never drawn, not even by a u of exactly 1, which some generators give.
    """
    mass = probs.double().cumsum(-1)
    whole = mass[:, -1:]
    found = torch.searchsorted(mass, uniform.double().unsqueeze(1) * whole, right=True)
    return torch.minimum(found, (mass < whole).sum(-1, keepdim=True)).squeeze(1)


def log_probabilities(logits: Tensor) -> Tensor:
    """The log of the model's own distribution (temperature 1, nothing left out), every row by itself: [B, V] fp32."""
    return torch.stack([row.log_softmax(-1) for row in logits.float()])


def _restrict(probs: Tensor, order: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``probs`` [V] with 0 for what top_k and top_p leave out; ``order`` [V] are the ids from the most probable down."""
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ordered = probs[order].double() * ((rank < top_k) | (top_k == 0))
    mass = ordered.cumsum(-1)
    keep = (mass - ordered < top_p * mass[-1]) | (top_p >= 1) | (rank == 0)
    return torch.zeros_like(probs).scatter(-1, order, (ordered * keep).float())


def _require(good: bool, name: str, expected: str, found: object) -> None:
    if not good:
        raise RequestError(f"{name}: expected {expected}, found {found!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
