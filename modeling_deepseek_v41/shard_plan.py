# SPDX-License-Identifier: Apache-2.0
"""Which part of every checkpoint tensor a rank holds: one table, and what follows from it for one rank."""

import re
from typing import NamedTuple

from .config import ModelConfig
from .layout import Layout


class Rule(NamedTuple):
    """Tensors whose name matches ``pattern`` are divided along ``dim`` as ``Layout.split(split)`` says."""

    pattern: str
    dim: int
    split: str


RULES = (
    Rule(r"(embed|head|mtp\.\d+\.markov_head\.head)\.weight", 0, "world"),
    Rule(r"(layers|mtp)\.\d+\.attn\.(wq_b|wo_a)\.(weight|scale)", 0, "attention"),
    Rule(r"(layers|mtp)\.\d+\.attn\.attn_sink", 0, "attention"),
    Rule(r"(layers|mtp)\.\d+\.attn\.wo_b\.(weight|scale)", 1, "o_proj"),
    Rule(r"layers\.\d+\.ffn\.experts\.\d+\.w[13]\.(weight|scale)", 0, "expert_columns"),
    Rule(r"layers\.\d+\.ffn\.experts\.\d+\.w2\.(weight|scale)", 1, "expert_columns"),
    Rule(r"mtp\.\d+\.ffn\.experts\.\d+\.w[13]\.(weight|scale)", 0, "dspark_expert_columns"),
    Rule(r"mtp\.\d+\.ffn\.experts\.\d+\.w2\.(weight|scale)", 1, "dspark_expert_columns"),
    Rule(r"(layers|mtp)\.\d+\.ffn\.shared_experts\.w[13]\.(weight|scale)", 0, "shared"),
    Rule(r"(layers|mtp)\.\d+\.ffn\.shared_experts\.w2\.(weight|scale)", 1, "shared"),
    Rule(r"layers\.\d+\.engram\.(embed|wkv)\.(weight|scale)", 0, "world"),
    Rule(r"mtp\.0\.main_proj\.(weight|scale)", 0, "world"),
)
"""Tensors that no rule names are on every rank. Experts are divided by id besides (``ShardPlan.stored_name``).

A dimension that the parts do not divide is divided as if it were longer; what lies behind its end is zeros. Scales of fp8
linears belong to blocks of 32 x 32 values: a part has those of all blocks that it touches."""

_EXPERT = re.compile(r"((layers|mtp)\.\d+\.ffn\.experts\.)(\d+)(\..*)")


class Part(NamedTuple):
    """Part number ``place`` of ``parts`` along ``dim``."""

    dim: int
    parts: int
    place: int

    def of(self, size: int) -> tuple[int, int]:
        """The part's range [start, stop) of a dimension of ``size``; it may reach behind the end."""
        width = -(-size // self.parts)
        return self.place * width, (self.place + 1) * width


class ShardPlan:
    """What ``rank`` of ``layout`` holds of ``config``'s checkpoint. Its own experts are numbered from 0."""

    def __init__(self, config: ModelConfig, layout: Layout, rank: int):
        self._layout, self._rank = layout, rank
        self._experts = {"layers": config.experts(False)[0], "mtp": config.experts(True)[0]}

    def part(self, name: str) -> Part | None:
        """The part of tensor ``name`` that the rank holds; None for all of it."""
        for rule in RULES:
            if re.fullmatch(rule.pattern, name):
                split = self._layout.split(rule.split)
                return Part(rule.dim, split.parts, split.places[self._rank]) if split.parts > 1 else None
        return None

    def stored_name(self, name: str) -> str:
        """The checkpoint's name of the rank's own tensor ``name``: they differ in the experts' numbers."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return name
        first, _ = self._own_experts(match[2])
        return f"{match[1]}{first + int(match[3])}{match[4]}"

    def holds(self, stored_name: str) -> bool:
        """Whether the rank holds any of the checkpoint's tensor ``stored_name``: not, where it is another rank's expert."""
        match = _EXPERT.fullmatch(stored_name)
        if match is None:
            return True
        first, stop = self._own_experts(match[2])
        return first <= int(match[3]) < stop

    def _own_experts(self, kind: str) -> tuple[int, int]:
        split = self._layout.split("experts" if kind == "layers" else "dspark_experts")
        count = self._experts[kind] // split.parts
        return split.places[self._rank] * count, (split.places[self._rank] + 1) * count
