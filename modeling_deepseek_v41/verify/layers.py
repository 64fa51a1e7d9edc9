# SPDX-License-Identifier: Apache-2.0
"""The per-layer tensors of one prompt, module by module on the golden's inputs, pooled per kind of tensor."""

import dataclasses
import re
from pathlib import Path

import torch
from torch import Tensor

from ..model import DeepseekV41Model
from ..state import allocate
from .compare import largest, relative_error, within
from .flips import Deviation, explain
from .golden_error import GoldenError
from .golden_inputs import GoldenInputs
from .golden_set import Prompt, is_drafters
from .qdq_trace import QdqTrace
from .report import KindResult, LayersResult
from .run import learn, propose

SHARE = 0.999
"""Of a kind's elements in ref mode, what must be equal: fp32 sums in another order round a rare bf16 result the other way."""

FP32_TOLERANCE = {"f32": 1e-5, "f32_noq": 1e-5, "ref": 1e-3}
"""Of fp32 tensors, relative to the row's largest. In ref, one bf16 rounding of the streams moves the mixes by some 1e-4."""

KINDS = {
    "attn_in", "attn_out", "candidates", "compress_kv", "compressor_latent_pre_rope", "confidence", "engram_out", "ffn_in",
    "ffn_out", "gate_indices", "gate_weights", "ids", "index_k", "main_hidden", "pre_out", "topk_idxs_with_offset",
    "window_ring", "x_out",
}  # fmt: skip
"""What a layer file holds, as far as this version knows."""


@dataclasses.dataclass
class _Pool:
    elements: int = 0
    equal: int = 0
    rows: int = 0
    bad_rows: int = 0
    ties: int = 0
    error: float = 0.0
    rule: str = ""


class Comparison:
    """Counts per kind, and the places where a tensor is outside the rule."""

    def __init__(self, mode: str, file: Path):
        self.file = file
        self.tolerance = FP32_TOLERANCE[mode]
        self.pools: dict[str, _Pool] = {}
        self.deviations: list[Deviation] = []
        self.unused: list[str] = []
        """Keys of the layer file that nothing was compared with."""

    def __call__(
        self, block: str, kind: str, found: Tensor, golden: Tensor, positions: Tensor, settled: Tensor | None = None
    ) -> None:
        """Adds ``found`` [n, ...] against ``golden`` [n, ...]; rows of ``settled`` count as equal.

        The drafter's tensors count for themselves: kind attn_out of block mtp.1 as "drafter attn_out".
        """
        if found.shape != golden.shape:
            raise GoldenError(
                f"{self.file}: {block}.{kind} has shape {list(golden.shape)} for one sequence, the model gives"
                f" {list(found.shape)}; give the checkpoint that this set was made from"
            )
        name = f"drafter {kind}" if block.startswith(("mtp.", "draft")) else kind
        pool = self.pools.setdefault(name, _Pool())
        if golden.dtype == torch.float32:
            equal, pool.rule = within(found, golden, self.tolerance), f"within {self.tolerance:.0e}"
        else:
            equal, pool.rule = found == golden, "equal"
        rows = equal.unsqueeze(-1).flatten(1)
        if settled is not None:
            pool.ties += int((settled & ~rows.all(-1)).sum())
            rows = rows | settled.unsqueeze(-1)
        pool.elements += rows.numel()
        pool.equal += int(rows.sum())
        if golden.is_floating_point():
            pool.error = max(pool.error, largest(relative_error(found, golden)))
        bad = positions[~rows.all(-1)].tolist()
        pool.rows += len(rows)
        pool.bad_rows += len(bad)
        self.deviations += [Deviation(0, position, block) for position in bad]


def check_layers(model: DeepseekV41Model, prompt: Prompt, mode: str, file: Path, golden: dict[str, Tensor]) -> LayersResult:
    """Compares every tensor of the layer file ``golden`` with the model's own, computed from the golden's inputs.

    The drafter's are compared where the model has it. ref: at least SHARE of each kind's elements bit-equal (fp32 tensors:
    within tolerance). f32_noq: every element within tolerance; f32 likewise, or brought there by undoing QDQ rounding
    flips. Raises GoldenError where the file belongs to another model.
    """
    _check_file(model, file, golden)
    comparison = _run(model, prompt, mode, file, golden)
    note = ""
    if mode == "f32" and comparison.deviations:
        comparison, note = _explain(model, prompt, mode, file, golden, comparison)
    share = SHARE if mode == "ref" else 1.0
    left = [key for key in comparison.unused if model.drafter is not None or not is_drafters(key)]
    unused = [key for key in left if _kind(key) in KINDS]
    kinds = [
        KindResult(
            kind=kind,
            elements=pool.elements,
            equal=pool.equal,
            rule=pool.rule,
            error_max=pool.error,
            ok=pool.equal >= share * pool.elements,
            note=_note(pool),
        )
        for kind, pool in sorted(comparison.pools.items())
    ]
    return LayersResult(file.name, kinds, unused, sorted({_kind(key) for key in left} - KINDS), note)


def _note(pool: _Pool) -> str:
    words = []
    if pool.bad_rows:
        words.append(f"{pool.elements - pool.equal} elements, in {pool.bad_rows} of {pool.rows} rows")
    if pool.ties:
        words.append(f"{pool.ties} rows differ by an exact tie")
    return "; ".join(words)


def _kind(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _check_file(model: DeepseekV41Model, file: Path, golden: dict[str, Tensor]) -> None:
    config = model.config
    numbers = [int(match[1]) for key in golden if (match := re.match(r"\w+\.layers\.(\d+)\.", key))]
    if not numbers:
        raise GoldenError(f"{file}: holds no per-layer tensors; copy the golden set again")
    if max(numbers) >= config.num_hidden_layers:
        raise GoldenError(
            f"{file}: has layer {max(numbers)}, num_hidden_layers of {config.source} is {config.num_hidden_layers};"
            " give the checkpoint that this set was made from"
        )
    stages = [int(match[1]) for key in golden if (match := re.match(r"\w+\.mtp\.(\d+)\.", key))]
    if model.drafter is not None and max(stages, default=0) >= config.num_nextn_predict_layers:
        raise GoldenError(
            f"{file}: has stage mtp.{max(stages)}, num_nextn_predict_layers of {config.source} is"
            f" {config.num_nextn_predict_layers}; give the checkpoint that this set was made from"
        )
    for key, tensor in golden.items():
        if key.endswith(".x_out") and tensor.shape[-2:] != (config.hc_mult, config.hidden_size):
            raise GoldenError(
                f"{file}: {key} has streams {list(tensor.shape[-2:])}, {config.source} asks for"
                f" {[config.hc_mult, config.hidden_size]}; give the checkpoint that this set was made from"
            )


@torch.inference_mode()
def _run(model: DeepseekV41Model, prompt: Prompt, mode: str, file: Path, golden: dict[str, Tensor]) -> Comparison:
    comparison = Comparison(mode, file)
    drafter, ids_after = model.drafter, prompt.generated[:1]
    state = allocate(model.state_spec(1))
    slot, rank = torch.zeros(1, dtype=torch.int64), model.parallel.rank_tensor()
    with GoldenInputs(model, golden, comparison) as inputs:
        for step, call in enumerate(_calls(prompt, golden)):
            inputs.call = call
            ids = ids_after[:, step - 1 : step] if step else prompt.input_ids[:1]
            first = prompt.length + step - 1 if step else 0
            stop = first + ids.shape[1]
            start = torch.tensor([first])
            _, taps, *_ = model(ids, start, torch.tensor([ids.shape[1]]), slot, rank, *state, read_len=stop)
            taps = inputs.taps(taps)
            if drafter is None:
                continue
            learn(model, drafter, taps, start, slot, state)
            if 0 < step < ids_after.shape[1]:
                inputs.call = f"draft{step - 1}"
                inputs.drafts(propose(model, drafter, ids_after[:, step], torch.tensor([stop]), slot, state))
    comparison.unused = sorted(golden.keys() - inputs.used)
    return comparison


def _calls(prompt: Prompt, golden: dict[str, Tensor]) -> tuple[str, ...]:
    """The prefill and the decode steps up to the last that ``golden`` has tensors of and ``prompt`` has ids for."""
    present = [int(match[1]) + 1 for key in golden if (match := re.match(r"(?:decode|draft)(\d+)\.", key))]
    steps = min(max(present, default=0), prompt.generated.shape[1])
    return "prefill", *(f"decode{step}" for step in range(steps))


def _explain(
    model: DeepseekV41Model, prompt: Prompt, mode: str, file: Path, golden: dict[str, Tensor], first: Comparison
) -> tuple[Comparison, str]:
    latest = first
    with QdqTrace(model) as trace:

        def deviations() -> list[Deviation]:
            nonlocal latest
            latest = _run(model, prompt, mode, file, golden)
            return sorted(latest.deviations, key=lambda place: place.position)

        flips = explain(trace, deviations)
    if flips is None:
        return first, "deviations not explained by QDQ rounding flips"
    return latest, "with these roundings flipped: " + "; ".join(map(str, flips))
