# SPDX-License-Identifier: Apache-2.0
"""One plan: memory of a rank, and what its calls cost."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..buckets import PREFILL_BUCKETS, prefill_buckets
from ..config import ModelConfig
from ..dspark.drafter import Drafter
from ..dspark.step import read_prompt, speculative_step
from ..errors import RequestError
from ..layout import Layout, make_layout
from ..model import DeepseekV41Model
from ..numerics import numerics_by_name
from ..parallel import Parallel
from ..progress import Progress
from ..state import allocate
from .accounting import Accounting, account
from .costs import Costs, Trace, TracedGroup
from .predict import MEMORY_BYTES, RESERVED_BYTES, Prediction, predict
from .storage import DRAFTER_EXPERTS, parameter_group, state_group

MOST_SEQUENCES = 1 << 20
"""Per step: more than any memory holds, few enough to count."""

PROMPT, PLAIN, DSPARK = "context encoding", "plain decode step", "DSpark step"
"""The stages of a run."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a plan is made for. Degrees as ``make_layout`` takes them; None is its default.

    seq_len: positions of state per sequence. batch: sequences per decode step; prompts are read one at a time. buckets:
    tokens per call that reads a prompt; the largest also reads what came before, up to seq_len.
    """

    world_size: int = 64
    attn_tp_degree: int | None = None
    moe_ep_degree: int | None = None
    dspark_moe_ep_degree: int | None = None
    o_proj_reduce: str = "group"
    mesh: str = "contiguous"
    seq_len: int = 8192
    batch: int = 1
    buckets: Sequence[int] = PREFILL_BUCKETS
    expert_weight_format: str = "fp8_exact"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One call of ``rows`` tokens for each of ``batch`` sequences that reads up to ``read_len`` positions."""

    name: str
    batch: int
    rows: int
    read_len: int
    costs: Costs
    prediction: Prediction

    @property
    def is_decode(self) -> bool:
        """Whether its whole time is predicted: exchanges of a prompt move more than the cost model knows."""
        return self.name != PROMPT


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every rank of ``layout`` needs and does. All have the same shapes."""

    layout: Layout
    settings: Settings
    memory: dict[str, int]
    """Bytes by group, weights first, then state."""
    accounting: Accounting
    stages: list[Stage]
    """Empty where a rank's memory does not hold the model."""

    @property
    def nbytes(self) -> int:
        """All that stays in a rank's memory."""
        return sum(self.memory.values())

    @property
    def refusal(self) -> str | None:
        """Why a rank's memory does not hold it; None where it does."""
        room = MEMORY_BYTES - RESERVED_BYTES
        if self.nbytes <= room:
            return None
        experts = self.memory["experts"] + self.memory.get(DRAFTER_EXPERTS, 0)
        return (
            f"expert_weight_format {self.settings.expert_weight_format} on world_size {self.layout.world_size}: a rank needs"
            f" {self.nbytes / 1e9:.2f} GB, {experts / 1e9:.2f} of them for routed experts, and has {room / 1e9:.2f}"
            f" ({MEMORY_BYTES / 1e9:.0f} GB per logical core, {RESERVED_BYTES / 1e9:.0f} left for graphs, exchanges and"
            " intermediates); choose a smaller format, more ranks, a smaller batch or seq_len"
        )


def make_plan(config: ModelConfig, settings: Settings, progress: bool = False) -> Plan:
    """The plan of ``config``'s model with its drafter, where it has one, in release numerics.

    Takes seconds per stage, which ``progress`` shows on stderr. Raises RequestError naming the setting that does not fit.
    Memory that is not enough is no error, but then no stage is traced: see ``Plan.refusal``.
    """
    layout, model, trace, state = _on_paper(config, settings)
    plan = Plan(layout, settings, _memory(trace), account(config, layout), [])
    if plan.refusal is None:
        plan.stages.extend(_stages(model, settings, layout, trace, state, progress))
    return plan


def rank_memory(config: ModelConfig, settings: Settings) -> dict[str, int]:
    """``Plan.memory`` alone, which takes no tracing."""
    return _memory(_on_paper(config, settings)[2])


def _memory(trace: Trace) -> dict[str, int]:
    memory: Counter[str] = Counter()
    for resident in trace.resident:
        memory[resident.group] += resident.nbytes
    return dict(memory)


def _on_paper(config: ModelConfig, settings: Settings) -> tuple[Layout, DeepseekV41Model, Trace, list[Tensor]]:
    """The layout, rank 0's model and state without data, and the trace that knows their tensors."""
    _check(config, settings)
    layout = make_layout(
        config, settings.world_size, settings.attn_tp_degree, settings.moe_ep_degree, settings.dspark_moe_ep_degree,
        settings.o_proj_reduce, settings.mesh,
    )  # fmt: skip
    trace = Trace()
    model = _model(config, settings, layout, trace)
    return layout, model, trace, _keep(model, settings, trace)


def _check(config: ModelConfig, settings: Settings) -> None:
    limit = config.max_position_embeddings
    if type(settings.seq_len) is not int or not 1 <= settings.seq_len <= limit:
        found = settings.seq_len
        raise RequestError(f"seq_len: expected 1 to max_position_embeddings {limit} of {config.source}, found {found!r}")
    if type(settings.batch) is not int or not 1 <= settings.batch <= MOST_SEQUENCES:
        raise RequestError(f"batch: expected an integer of 1 to {MOST_SEQUENCES}, found {settings.batch!r}")
    prefill_buckets(settings.seq_len, settings.buckets)


def _model(config: ModelConfig, settings: Settings, layout: Layout, trace: Trace) -> DeepseekV41Model:
    """Rank 0's modules on the meta device. Rows need not be computed one by one: a device's kernels see to that."""
    world, attention = (tuple(range(layout.world_size)),), layout.mesh
    parallel = Parallel(layout, 0, TracedGroup("world", world, trace), TracedGroup("attention", attention, trace))
    kept = settings.expert_weight_format
    with torch.device("meta"):
        model = DeepseekV41Model(
            config, numerics_by_name("release"), settings.seq_len, kept, "torch", parallel, exact_tokens=0,
            weight_dtype=torch.bfloat16,
        )  # fmt: skip
        if config.num_nextn_predict_layers:
            drafter = Drafter(config, model.numerics, kept, parallel)
            drafter.rope_plain = model.rope_plain
            model.add_drafter(drafter)
    return model


def _keep(model: DeepseekV41Model, settings: Settings, trace: Trace) -> list[Tensor]:
    """Declares weights, tables and state to ``trace``; returns the state."""
    for name, parameter in model.named_parameters():
        trace.keep(parameter, parameter_group(name.removeprefix("drafter.")))
    for _, table in model.named_buffers():
        trace.keep(table, "rotary and token tables")
    spec = model.state_spec(settings.batch)
    state = allocate(spec, "meta")
    for entry, tensor in zip(spec, state, strict=True):
        trace.keep(tensor, state_group(entry.name))
    return state


def _stages(
    model: DeepseekV41Model, settings: Settings, layout: Layout, trace: Trace, state: list[Tensor], progress: bool
) -> list[Stage]:
    """Prompts bucket by bucket, a plain decode step and, where there is a drafter, a speculative one."""
    config, buckets, longest = model.config, prefill_buckets(settings.seq_len, settings.buckets), settings.seq_len
    calls = [(PROMPT, 1, rows, rows if rows < buckets[-1] else longest) for rows in buckets]
    calls.append((PLAIN, settings.batch, 1, longest))
    if model.drafter is not None:
        calls.append((DSPARK, settings.batch, config.dspark_block_size + 1, longest))
    bar = Progress(len(calls), "calls", "tracing") if progress else None
    stages = []
    for name, batch, rows, read_len in calls:
        trace.costs = Costs()
        _trace(model, trace, state, name, batch, rows, read_len)
        stages.append(Stage(name, batch, rows, read_len, trace.costs, predict(trace.costs, layout)))
        if bar is not None:
            bar.update(1)
    if bar is not None:
        bar.close()
    return stages


def _trace(model: DeepseekV41Model, trace: Trace, state: list[Tensor], name: str, batch: int, rows: int, read_len: int) -> None:
    """One call of the stage ``name`` inside ``trace``; of a prompt, the logits of its last row."""
    drafter = model.drafter
    with torch.no_grad(), torch.device("meta"):
        ids = torch.zeros(batch, rows, dtype=torch.int64)
        start, length, slot = (torch.zeros(batch, dtype=torch.int64) for _ in range(3))
        where = (start, length, slot, torch.zeros(1, dtype=torch.int64))
        with trace:
            if name == DSPARK and drafter is not None:
                k = model.config.dspark_block_size
                speculative_step(model, drafter, ids[:, 0], *where, state, num_draft_tokens=k, read_len=read_len)
                return
            if name == PROMPT and drafter is not None:
                hidden = read_prompt(model, drafter, ids, *where, *state, read_len=read_len)[0]
            else:
                hidden = model(ids, *where, *state, read_len=read_len)[0]
            model.logits(hidden[:, -1:])
