# SPDX-License-Identifier: Apache-2.0
"""The table of one decode step in docs/kernels.md, which write_step_table.py puts there."""

import collections
from typing import NamedTuple

import torch
from release_step import DRAFTER, HEAD, REST, Cost, kinds, release_step

BEGIN, END = "<!-- begin: python tests/kernels_nki/write_step_table.py -->\n", "<!-- end -->\n"
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "dma")
HBM_RATE = 725_000.0
"""Bytes per us of a logical core."""
LINEARS = ("linear", "linears", "query_projection", "output_projection", "route_and_share")
"""Kernels that mostly read weights, the experts' apart."""
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Sums(NamedTuple):
    """Of several launches: us per engine, bytes, bounds and latencies added up."""

    busy: dict[str, float]
    nbytes: int
    bound: float
    latency: float
    launches: int


def sums(counts: dict[tuple, int], costs: dict[tuple, Cost]) -> Sums:
    """Of ``counts`` of each launch."""
    found = [(costs[key], times) for key, times in counts.items()]
    busy = {engine: sum(cost.busy[engine] * times for cost, times in found) for engine in ENGINES}
    numbers = (sum(getattr(cost, name) * times for cost, times in found) for name in ("nbytes", "bound", "latency"))
    nbytes, bound, latency = numbers
    return Sums(busy, int(nbytes), bound, latency, sum(counts.values()))


class Table:
    """What ``release_step`` found, as numbers and as text."""

    def __init__(self) -> None:
        model, launches, self.exchanges = release_step()
        self.counts, self.costs, self.kinds = dict(launches.counts), launches.costs, kinds(model)
        everything: collections.Counter = collections.Counter()
        for found in self.counts.values():
            everything.update(found)
        self.everything, self.total = everything, sums(everything, self.costs)

    def text(self) -> str:
        """Both tables."""
        names = [name for name in self.kinds if name not in (DRAFTER, HEAD, REST)] + [DRAFTER, HEAD, REST]
        lines = [
            "Per module of each kind, µs and MB of one rank. One by one: every launch from its first instruction to its last,",
            "added up. Bound: the busiest engine of each launch, the DMAs by their bytes.",
            "",
            "| what | per step | launches | tensor | vector | scalar | GpSimd | DMA | MB | bound | one by one |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for name in names:
            found, times = sums(self.counts[name], self.costs), self.kinds[name]
            lines.append(f"| {name} | {times} | {found.launches // times} | {_numbers(found, times)} |")
        total = self.total
        lines.append(f"| **whole step** | | {total.launches} | {_numbers(total, 1)} |")
        lines += [
            "", f"All bytes at 725 GB/s: {total.nbytes / HBM_RATE / 1e3:.1f} ms. Bounds: {total.bound / 1e3:.1f} ms."
            f" One by one: {total.latency / 1e3:.1f} ms. VectorE: {total.busy['vector'] / total.bound:.0%} of the bounds.",
            "", f"Exchanges: {self.exchanges['world']} in the world, {self.exchanges['attention']} in an attention group.", "",
            "Per launch, the calls of a whole step in the third column.", "",
            "| kernel | rows and shape | calls | tensor | vector | scalar | GpSimd | DMA | MB | bound | one by one | ratio |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        rows: collections.Counter = collections.Counter()
        for key, times in self.everything.items():
            cost = self.costs[key]
            numbers = _numbers(Sums(cost.busy, cost.nbytes, cost.bound, cost.latency, 1), 1)
            rows[f"| `{key[0]}` | {_shape(key)} |", f"{numbers} | {cost.latency / cost.bound:.1f} |"] += times
        lines += [f"{name} {times} | {numbers}" for (name, numbers), times in sorted(rows.items())]
        return "\n".join(lines) + "\n"


def _numbers(found: Sums, times: int) -> str:
    engines = [f"{found.busy[engine] / times:.1f}" for engine in ENGINES]
    return " | ".join(
        [*engines, f"{found.nbytes / times / 1e6:.2f}", f"{found.bound / times:.1f}", f"{found.latency / times:.1f}"]
    )


def _shape(key: tuple) -> str:
    name, tensors, cores, given = key
    constants = dict(given)
    rows = " × ".join(str(size) for size in tensors[0][0])
    words = {
        "linear": lambda: f"{rows} → {constants['columns']}, {SHORT[tensors[1][1]]}",
        "query_projection": lambda: f"{rows} → {tensors[3][0][1]} → {_listed(constants['columns'])}, KV {tensors[5][0][1]}",
        "linears": lambda: f"{rows} → {_listed(constants['columns'])}",
        "output_projection": lambda: f"{rows} → {constants['low']} → {constants['columns']}",
        "route_and_share": lambda: f"{rows}, {tensors[2][0][1]} experts, {constants['columns']} columns",
        "active_experts": lambda: f"{rows}, {tensors[1][0][0]} experts here",
        "sparse_attention": lambda: f"{rows}, {tensors[4][0][1]} + {tensors[8][0][1] if len(tensors) > 8 else 0} keys",
        "index_scores": lambda: f"{rows}, {constants['count']} groups",
        "top_k": lambda: f"{rows}, {SHORT[tensors[0][1]]}",
    }
    shape = words[name]() if name in words else rows
    return shape if cores == 2 else f"{shape}, one core"


def _listed(columns: tuple[int, ...]) -> str:
    return ", ".join(str(one) for one in columns)


def with_table(document: str, table: str) -> str:
    """``document`` with ``table`` between its two marks."""
    before, rest = document.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END, 1)[1]
