# SPDX-License-Identifier: Apache-2.0
"""A report as tables on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .layers import SHARE
from .logits import SPOILED_TOLERANCE, TOLERANCE
from .report import LayersResult, ModeResult, Report

RULES = {
    "f32": f"every row: greedy id equal, error <= {TOLERANCE:.0e}; behind a shown QDQ rounding flip <= {SPOILED_TOLERANCE:.0e}",
    "f32_noq": f"every row before a recorded tie: greedy id equal, error <= {TOLERANCE:.0e}",
    "ref": "greedy id equal where the golden's margin is above the reference's own noise; errors are shown, not judged",
}

DRAFT_RULES = {
    "f32": f"ids equal, error of logits and confidence <= {TOLERANCE:.0e}, behind a flip <= {SPOILED_TOLERANCE:.0e}",
    "f32_noq": f"before a recorded tie ids equal, error of logits and confidence <= {TOLERANCE:.0e}",
    "ref": "from the golden's taps, ids equal where the reference's own noise leaves them equal; errors are shown, not judged",
}


def print_report(report: Report, console: Console) -> None:
    """Prints every mode, then one line that says whether all is well. ``console`` takes no markup."""
    console.print(f"checkpoint {report.model_path}\ngolden set {report.golden}")
    for mode in report.modes:
        _print_mode(mode, console)
    console.print(Text("\n") + Text(", ").join(Text(f"{mode.mode} ") + _verdict(mode.ok) for mode in report.modes))


def _print_mode(mode: ModeResult, console: Console) -> None:
    console.print(Text(f"\n{mode.mode}", style="bold") + Text(f" (numerics {mode.numerics}), the golden's ids fed", style=""))
    console.print(RULES[mode.mode])
    table = _table("prompt", "rows", "judged", "ids equal", "error median", "error max", "verdict", "note")
    for row in mode.prompts:
        errors = (_number(row.error_median), _number(row.error_max))
        equal = f"{row.ids_equal} of {row.counted}"
        verdict = _verdict(row.ok) if row.counted else Text("-")
        table.add_row(row.prompt, str(row.rows), str(row.counted), equal, *errors, verdict, row.note)
    console.print(table)
    if mode.drafts:
        _print_drafts(mode, console)
    for layers in mode.layers:
        _print_layers(layers, mode.mode, console)
    for hashes in mode.hashes:
        equal = f"{hashes.equal} of {hashes.positions} positions equal, "
        console.print(Text(f"engram hashes {hashes.prompt}: {equal}") + _verdict(hashes.ok))
    for words in mode.left_out:
        console.print(words)


def _print_drafts(mode: ModeResult, console: Console) -> None:
    console.print(f"drafts, of the prefill and of every step: {DRAFT_RULES[mode.mode]}")
    columns = ("logits median", "logits max", "confidence max")
    table = _table("prompt", "steps", "judged", "ids equal", *columns, "verdict", "note")
    for row in mode.drafts:
        errors = (row.logits_error_median, row.logits_error_max, row.confidence_error_max)
        equal = f"{row.ids_equal} of {row.counted}"
        verdict = _verdict(row.ok) if row.counted else Text("-")
        table.add_row(row.prompt, str(row.steps), str(row.counted), equal, *map(_number, errors), verdict, row.note)
    console.print(table)


def _print_layers(layers: LayersResult, mode: str, console: Console) -> None:
    share = f"at least {100 * SHARE:g} %" if mode == "ref" else "all"
    console.print(f"{layers.file}: each module on golden inputs; {share} of a kind's elements must meet the rule")
    if layers.note:
        console.print(layers.note)
    table = _table("kind", "elements", "meet it", "rule", "error max", "verdict", "note")
    for row in layers.kinds:
        share = f"{100 * row.equal / row.elements:.4f} %" if row.elements else "-"
        table.add_row(row.kind, str(row.elements), share, row.rule, _number(row.error_max), _verdict(row.ok), row.note)
    console.print(table)
    if layers.unknown:
        console.print(f"not checked, kinds that this version does not know: {', '.join(layers.unknown)}")
    if layers.unused:
        some = ", ".join(layers.unused[:5])
        console.print(Text(f"{len(layers.unused)} tensors of the file were not compared ({some}): ") + _verdict(False))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("prompt", "kind", "rule", "verdict", "note") else "right")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _verdict(ok: bool) -> Text:
    return Text("ok", style="green") if ok else Text("FAILED", style="red")
