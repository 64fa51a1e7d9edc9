# SPDX-License-Identifier: Apache-2.0
"""How long a decode step would take on a trn2.48xlarge: a cost model that no device confirmed (docs/kernels.md, 3 to 5)."""

import dataclasses
import functools

import torch

from ..layout import Layout
from .costs import Costs, Product
from .storage import DRAFTER_EXPERTS

MEMORY_BYTES = 24 * 10**9
"""Of a logical core: two physical ones (LNC=2), a quarter of a chip's 96 GB."""
RESERVED_BYTES = 2 * 10**9
"""Left for graphs, exchange buffers, intermediates and the runtime: an assumption."""
MEMORY_RATE = 725e9
"""Bytes per second of a logical core: a quarter of a chip's 2.9 TB/s."""
CLOCK, CORES, TILE, LEAST_ROWS = 2.4e9, 2, 128, 64
"""The tensor engine streams one row per cycle past a tile of 128 x 128 weights; fewer than 64 rows take as long as 64."""
EXCHANGE_SECONDS = (15e-6, 104e-6)
"""Per exchange: what the documentation's figures give, and the most that published runs on the device allow."""
SAMPLES = 256

ASSUMPTIONS = (
    "nothing was measured: these are rates of the documentation and of published runs, not of this model",
    f"memory {MEMORY_RATE / 1e9:.0f} GB/s per logical core; intermediates stay on the chip; every weight is read once per call",
    "dense weights in bf16, decoded when they are loaded; engram rows as stored",
    f"tensor engine {CLOCK / 1e9:.1f} GHz x {CORES} cores, bf16 rate; fewer than {LEAST_ROWS} rows cost as many; products over"
    f" fewer than {TILE} columns are left to other engines",
    f"an exchange takes {EXCHANGE_SECONDS[0] * 1e6:.0f} (documented) to {EXCHANGE_SECONDS[1] * 1e6:.0f} us (upper bound from"
    " published runs) whatever its bytes, so context encoding, which moves megabytes, has no prediction",
    "fast: reads only experts that a row chose, on the busiest rank under uniform routing; slow: reads every local expert",
    "fp4_bytes: the time of decoding in the kernel is not in the figures, and may be most of it (docs/kernels.md, section 4)",
    "memory and tensor engine run side by side; softmax, norms, Sinkhorn, top-k and sampling hide behind them",
)
"""What the figures rest on."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one call. ``active``: the share of its local experts that the busiest rank reads."""

    active: float
    memory_fast: float
    memory_slow: float
    engine_fast: float
    engine_slow: float
    exchanges_fast: float
    exchanges_slow: float

    @property
    def fast(self) -> float:
        """With experts that no row chose left out, at the documentation's rates."""
        return max(self.memory_fast, self.engine_fast) + self.exchanges_fast

    @property
    def slow(self) -> float:
        """With every local expert, and exchanges as slow as published runs allow."""
        return max(self.memory_slow, self.engine_slow) + self.exchanges_slow


def predict(costs: Costs, layout: Layout) -> Prediction:
    """The time of a call that costs ``costs``."""
    expert_bytes = sum(call.nbytes for call in costs.experts)
    expert_seconds = sum(engine_seconds(product) for call in costs.experts for product in call.products)
    active_bytes = active_seconds = 0.0
    for call in costs.experts:
        by_id, _ = layout.expert_degrees(call.group == DRAFTER_EXPERTS)
        share = busiest_share(call.rows, call.top_k, call.local, by_id)
        active_bytes += share * call.nbytes
        active_seconds += share * sum(engine_seconds(product) for product in call.products)
    bytes_moved = sum(costs.reads.values()) + sum(costs.writes.values())
    seconds = sum(engine_seconds(product) for product in costs.products)
    exchanges = sum(entry.count for entry in costs.exchanges.values())
    return Prediction(
        active=active_bytes / expert_bytes,
        memory_fast=(bytes_moved - expert_bytes + active_bytes) / MEMORY_RATE,
        memory_slow=bytes_moved / MEMORY_RATE,
        engine_fast=seconds + active_seconds,
        engine_slow=seconds + expert_seconds,
        exchanges_fast=exchanges * EXCHANGE_SECONDS[0],
        exchanges_slow=exchanges * EXCHANGE_SECONDS[1],
    )


def engine_seconds(product: Product) -> float:
    """Of the tensor engine, the larger of the two matrices standing in its tiles."""
    if product.k < TILE:
        return 0.0
    standing, moving = (-(-size // TILE) for size in (product.n, product.m)), (product.m, product.n)
    cycles = min(tiles * max(LEAST_ROWS, rows) for tiles, rows in zip(standing, moving, strict=True))
    return product.times * -(-product.k // TILE) * cycles / CLOCK / CORES


@functools.cache
def busiest_share(rows: int, top_k: int, local: int, parts: int) -> float:
    """The share of its ``local`` experts that is chosen by ``rows`` tokens on the busiest of ``parts`` ranks, on average.

    Every token chooses ``top_k`` of all experts with equal chances; SAMPLES draws with a fixed seed.
    """
    experts = local * parts
    if rows * top_k >= 8 * experts:
        return 1.0
    generator = torch.Generator().manual_seed(0)
    total = 0
    for _ in range(SAMPLES):
        chosen = torch.rand(rows, experts, generator=generator).topk(top_k).indices
        total += int(torch.zeros(experts).index_fill(0, chosen.flatten(), 1).view(parts, local).sum(1).max())
    return total / SAMPLES / local
