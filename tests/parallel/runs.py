# SPDX-License-Identifier: Apache-2.0
"""What a rank does in a test: loads its parts of a checkpoint and generates, plainly and with drafts."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.layout import make_layout
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.parallel import SINGLE, Group, Parallel, connect
from modeling_deepseek_v41.runner import Runner
from modeling_deepseek_v41.verify import GoldenSet
from modeling_deepseek_v41.verify.run import teacher_forced


@dataclasses.dataclass(frozen=True)
class Run:
    """A checkpoint, how it is computed, and what is generated: plain steps, then from the prompts again steps with drafts."""

    folder: Path
    numerics: str = "fp32"
    prompts: tuple[tuple[int, ...], ...] = ((3, 5, 8),)
    steps: int = 4
    draft_steps: int = 2
    kernels: str = "torch"
    experts: str = "decoded"


class Counting(Group):
    """A group that counts what is asked of it, under ``name``."""

    def __init__(self, group: Group, name: str, counts: Counter[str]):
        self.size, self.places, self.process_group = group.size, group.places, group.process_group
        self._group, self._name, self._counts = group, name, counts

    def all_reduce(self, x: Tensor) -> Tensor:
        self._counts[f"{self._name} sum"] += 1
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self._counts[f"{self._name} gather"] += 1
        return self._group.all_gather(x)


def rank_results(runs: list[Run], options: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """In a rank of torch.distributed: ``results`` of every run in every layout, which ``options`` of make_layout give."""
    world_size = torch.distributed.get_world_size()
    return [
        [_counted(run, connect(make_layout(load_config(run.folder), world_size, **some))) for run in runs] for some in options
    ]


def _counted(run: Run, made: Parallel) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    world, attention = Counting(made.world, "world", counts), Counting(made.attention, "group", counts)
    return results(run, Parallel(made.layout, made.rank, world, attention), counts)


def golden_logits(
    folder: Path, numerics: str, mode: str, prompts: list[str], options: list[dict[str, Any]]
) -> list[list[Tensor]]:
    """In a rank: logits [1, steps, vocab] of ``prompts`` of the golden set in ``folder``, its own tokens fed, per layout."""
    found = []
    for some in options:
        parallel = connect(make_layout(load_config(folder / "ckpt"), torch.distributed.get_world_size(), **some))
        model = load_model(folder / "ckpt", numerics, kernels="torch", progress=False, parallel=parallel)
        chosen = [prompt for prompt in GoldenSet(folder).prompts(mode, model.config) if f"p{prompt.length}" in prompts]
        found.append([teacher_forced(model, prompt).logits for prompt in chosen])
    return found


def results(run: Run, parallel: Parallel = SINGLE, counts: Counter[str] | None = None) -> dict[str, Any]:
    """Logits and tokens of every call; with a ``counts`` that is filled beside, what one call of each kind added to it."""
    counts = Counter() if counts is None else counts
    model = load_model(run.folder, run.numerics, 128, run.experts, run.kernels, False, drafter=True, parallel=parallel)
    found: dict[str, Any] = {"counts": {}}
    batch = len(run.prompts)
    slots = list(range(batch))

    def counted(kind: str, before: Counter[str]) -> None:
        found["counts"][kind] = dict(counts - before)

    plain = Runner(model, batch)
    first = torch.stack([plain.logits(plain.prefill(prompt, 0, slot)[:, -1:])[0, 0] for slot, prompt in enumerate(run.prompts)])
    logits, at = [first], [len(prompt) for prompt in run.prompts]
    for _ in range(run.steps):
        before = counts.copy()
        hidden = plain.call(logits[-1].argmax(-1, keepdim=True), at, [1] * batch, slots)
        counted("plain step", before)
        logits.append(plain.logits(hidden)[:, 0])
        at = [position + 1 for position in at]
    found["logits"] = torch.stack(logits, 1)
    found["tokens"] = found["logits"].argmax(-1)

    drafting = Runner(model, batch, drafter=model.drafter)
    for slot, prompt in enumerate(run.prompts):
        drafting.prefill(prompt, 0, slot)
    token, at = first.argmax(-1), [len(prompt) for prompt in run.prompts]
    k = model.config.dspark_block_size
    found["drafted"], found["drafts"], found["draft logits"] = [], [], []
    for _ in range(run.draft_steps):
        before = counts.copy()
        step = drafting.speculate(token.tolist(), at, [k + 1] * batch, slots, k)
        counted("draft step", before)
        found["drafted"].append(step.tokens)
        found["drafts"].append(step.drafts.ids)
        found["draft logits"].append(step.drafts.logits)
        token, at = step.next_token, step.next_start.tolist()
    return found
