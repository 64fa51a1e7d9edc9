# SPDX-License-Identifier: Apache-2.0
"""``deepseek-v41 plan``: what a run on many ranks would take, without a device and without weights."""

import argparse
import dataclasses
import sys
from typing import Any

from rich.table import Table

from ..buckets import PREFILL_BUCKETS
from ..config import load_config
from ..expert_bank import EXPERT_WEIGHT_FORMATS
from ..plan import Plan, Settings, make_plan
from ..plan.check import Stage
from ..plan.predict import ASSUMPTIONS, MEMORY_BYTES, RESERVED_BYTES
from ..progress import format_bytes
from .layout_options import add_layout_arguments, ranks_in_words
from .output import console, print_json

EPILOG = """\
The model's own modules run on tensors without data; every product, read and exchange is counted as it happens. All ranks have
the same shapes, so the figures are every rank's. Times are predictions: no device confirmed them.

Exit codes: 0 a rank's memory holds it, 1 it does not, 2 the layout or an option does not fit the configuration.

examples:
  deepseek-v41 plan --config CKPT
  deepseek-v41 plan --config config.json --moe-ep-degree 8 --seq-len 131072 --batch 4 --buckets 128 1024
  deepseek-v41 plan --config CKPT --expert-weight-format bf16 --json
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="memory, exchanges and predicted time of a run on many ranks",
        description="Says what each rank of a run would hold, read, compute and exchange, from the configuration alone.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--config", required=True, metavar="CONFIG", help="a config.json, or a folder that holds one")
    add_layout_arguments(parser, 64, "ranks; 64 are one trn2.48xlarge (default: 64)")
    group = parser.add_argument_group("run")
    group.add_argument("--seq-len", type=int, default=8192, metavar="N", help="positions per sequence (default: 8192)")
    group.add_argument("--batch", type=int, default=1, metavar="B", help="sequences per decode step (default: 1)")
    group.add_argument(
        "--buckets",
        type=int,
        nargs="+",
        default=list(PREFILL_BUCKETS),
        metavar="T",
        help=f"tokens per call that reads a prompt (default: {' '.join(map(str, PREFILL_BUCKETS))})",
    )
    group.add_argument(
        "--expert-weight-format",
        choices=EXPERT_WEIGHT_FORMATS,
        default="fp8_exact",
        help="how routed experts are kept: in bf16, as the stored fp4 bytes, or re-encoded to fp8 without a change (default:"
        " fp8_exact)",
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Plans and prints; raises the package's errors for what does not fit the configuration."""
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in vars(args).items() if name in names})
    plan = make_plan(load_config(args.config), settings, progress=not args.json)
    if args.json:
        print_json(_as_json(plan))
    else:
        _print(plan)
    sys.stdout.flush()
    if plan.refusal is not None:
        print(f"does not fit: {plan.refusal}", file=sys.stderr)
        return 1
    return 0


def _print(plan: Plan) -> None:
    out = console()
    out.print(ranks_in_words(plan.layout))
    out.print(_memory_table(plan))
    found = plan.accounting
    out.print(
        f"the checkpoint's {found.tensors} tensors, {format_bytes(found.nbytes)} as stored: {found.whole} are whole over the"
        f" ranks ({found.split} of them divided), {found.unread} are for image input and not read"
    )
    longer = [str(size) for size in plan.settings.buckets if size > plan.settings.seq_len]
    if longer:
        out.print(f"--buckets: {', '.join(longer)} of more than --seq-len {plan.settings.seq_len} positions are cut to that")
    for stage in plan.stages:
        out.print(_stage_table(stage))
    if plan.stages:
        out.print("each call is one graph; none of them reads a value on the host, which the trace would refuse")
        out.print("predicted, and what that rests on:")
        for words in ASSUMPTIONS:
            out.print(f"  - {words}")


def _memory_table(plan: Plan) -> Table:
    table = Table(title=f"memory of each rank, experts in {plan.settings.expert_weight_format}", title_justify="left")
    table.add_column("group")
    for name in ("bytes", "size", f"share of {MEMORY_BYTES / 1e9:.0f} GB"):
        table.add_column(name, justify="right")
    rows = [*plan.memory.items(), ("all", plan.nbytes), (f"free, {RESERVED_BYTES / 1e9:.0f} GB kept back", _free(plan))]
    for group, size in rows:
        table.add_row(group, f"{size:,}", format_bytes(size), f"{100 * size / MEMORY_BYTES:.1f} %")
    return table


def _free(plan: Plan) -> int:
    return MEMORY_BYTES - RESERVED_BYTES - plan.nbytes


def _stage_table(stage: Stage) -> Table:
    costs, times = stage.costs, stage.prediction
    title = f"{stage.name}: {stage.batch} x {stage.rows} tokens, reads {stage.read_len} positions"
    table = Table(title=title, title_justify="left", show_header=False)
    for (group, kind), entry in sorted(costs.exchanges.items(), reverse=True):
        table.add_row(f"exchanges, {group}", f"{entry.count} {kind}s", format_bytes(entry.nbytes))
    table.add_row("matrix products", "without routed experts", f"{costs.flops / 1e9:,.2f} GFLOP")
    table.add_row("", "routed experts, all local ones over all rows", f"{costs.expert_flops / 1e9:,.2f} GFLOP")
    table.add_row("memory", "read", format_bytes(sum(costs.reads.values())))
    for group, size in costs.reads.most_common(4):
        table.add_row("", f"  {group}", format_bytes(size))
    table.add_row("", "written", format_bytes(sum(costs.writes.values())))
    table.add_row("predicted", "memory, active experts to all", _span(times.memory_fast, times.memory_slow))
    table.add_row("", "tensor engine, active experts to all", _span(times.engine_fast, times.engine_slow))
    if stage.is_decode:
        table.add_row("", "exchanges", _span(times.exchanges_fast, times.exchanges_slow))
        table.add_row("", "step", _span(times.fast, times.slow))
    return table


def _span(fast: float, slow: float) -> str:
    return f"{fast * 1e3:.2f} to {slow * 1e3:.2f} ms"


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "layout": dataclasses.asdict(plan.layout) | {"attn_tp_degree": plan.layout.attn_tp_degree},
        "settings": dataclasses.asdict(plan.settings),
        "memory": {
            "groups": plan.memory, "bytes": plan.nbytes, "limit": MEMORY_BYTES, "reserved": RESERVED_BYTES,
            "fits": plan.refusal is None, "refusal": plan.refusal,
        },
        "checkpoint": plan.accounting._asdict(),
        "stages": [_stage_as_json(stage) for stage in plan.stages],
        "assumptions": list(ASSUMPTIONS),
    }  # fmt: skip


def _stage_as_json(stage: Stage) -> dict[str, Any]:
    costs, times = stage.costs, stage.prediction
    predicted: dict[str, Any] = {f"{name}_seconds": value for name, value in dataclasses.asdict(times).items()}
    predicted["active_experts_share"] = predicted.pop("active_seconds")
    predicted["step_seconds"] = [times.fast, times.slow] if stage.is_decode else None
    return {
        "stage": stage.name,
        "batch": stage.batch,
        "rows": stage.rows,
        "read_len": stage.read_len,
        "graph_launches": 1,
        "host_syncs": 0,
        "exchanges": [
            {"group": group, "kind": kind, "count": entry.count, "bytes": entry.nbytes}
            for (group, kind), entry in costs.exchanges.items()
        ],
        "flops": {"dense": costs.flops, "routed_experts": costs.expert_flops},
        "bytes_read": dict(costs.reads),
        "bytes_written": dict(costs.writes),
        "predicted": predicted,
    }
