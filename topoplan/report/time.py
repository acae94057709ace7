"""The time of a step by part, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from topoplan.engines.account import Flow, TimeAccount
from topoplan.planner.plan import Plan
from topoplan.planner.view import rounded
from topoplan.report.dump import picked, plain
from topoplan.report.tables import heading, paragraph, print_formulas, stage_name, stage_span, table_of
from topoplan.report.text import counted, significant
from topoplan.terms import Term

_MIB = 2**20
MOMENTS = {
    "forward": "every forward",
    "backward": "every backward",
    "last": "the last backward",
    "after": "after the optimizer step",
    "layers": "every layer",
    "stages": "every micro batch",
}
"""When a communication takes place, in words."""
_SENT = (
    "name kind=call.kind moment times calls ranks=call.group.size nodes call_bytes=call.sent_bytes call_s=call.call_s"
    " bytes_per_s step_s source"
)


def time_to_dict(plan: Plan, account: TimeAccount) -> dict[str, Any]:
    """Return every term of a step's time, in seconds."""
    return {
        "step": plain(account.step),
        "band_s": plain(plan.time.band_s),
        **picked(account, "microbatches slowest_stage stages layers"),
        "sent": [picked(one, _SENT) | {"call_bytes": rounded(one.call.sent_bytes)} for one in account.sent],
        "copied_s": plain(account.copied_s),
    }


def print_time(console: Console, plan: Plan, account: TimeAccount) -> None:
    """Print the parts of a step, its layers by operator, the rest of the step, and the communication."""
    heading(console, "Time of a step, by part")
    console.print(_parts(plan, account.step))
    if len(account.stages) > 1:
        heading(console, "Stages, ms of one micro batch")
        console.print(_stages(account))
    where = f"{stage_name(_slowest(account))}, operator" if account.stages else "A layer, operator"
    batches = counted(account.microbatches, "micro batch", "micro batches")
    for layer in account.layers:
        runs = f"{counted(layer.facts['count'], 'layer')} x {batches}"
        heading(console, f"{where} by operator: {layer.name}, {runs}; ms each, s and % in total")
        console.print(_operators(account.step, layer))
    heading(console, "Outside the layers")
    console.print(_around(account))
    if account.sent:
        heading(console, "Communication, as if nothing overlapped with it")
        console.print(_sent(account.sent))
        paragraph(console, f"{_overlap_words(account)}MiB: the whole tensor, or what a rank sends.", style="dim")
    if account.copied_s:
        exposed = account.step.child("offload")
        paragraph(
            console,
            f"Copies over PCIe take {significant(account.copied_s)} s per step, of which"
            f" {significant(exposed.value if exposed else 0.0)} s are exposed (not overlapped with computation).",
            style="dim",
        )
    calls = {one.call.kind: one for one in account.sent}
    sent = [(kind, Term(kind, 0.0, "s", one.source)) for kind, one in calls.items()]
    print_formulas(console, [*((one.name, one) for one in account.step.children), *sent])


def _slowest(account: TimeAccount) -> tuple[int, ...]:
    """Return the stages that determine the step, including those that take equally long."""
    if len(account.stages) == 1:
        return (account.slowest_stage,)
    return next(stages for one in account.stages if account.slowest_stage in (stages := one.facts["stages"]))


def _share(term: Term, step: Term) -> str:
    return f"{100 * term.value / step.value:.1f}"


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds; a dash for zero."""
    return significant(1000 * seconds) if seconds else "-"


def _parts(plan: Plan, step: Term) -> Table:
    table = table_of("part", right=("s", "%"), last=("what",))
    for part in sorted(step.children, key=lambda one: -one.value):
        table.add_row(part.name, significant(part.value), _share(part, step), part.what)
    low, high = plan.time.band_s
    expected = f"expected between {significant(low)} and {significant(high)} s"
    table.add_row("step", significant(step.value), "100.0", expected, style="bold")
    return table


def _stages(account: TimeAccount) -> Table:
    table = table_of("stage", right=("layers", "forward", "backward", "total"))
    for one in account.stages:
        stages = one.facts["stages"]
        table.add_row(
            stage_span(stages),
            str(one.facts["layers"]),
            *(_ms(half.value) for half in one.children),
            _ms(one.value),
            style="bold" if account.slowest_stage in stages else None,
        )
    return table


def _operators(step: Term, layer: Term) -> Table:
    """Tabulate milliseconds of one layer and micro-batch, then seconds per step; `part` leads to the formula."""
    figures = [("forward_s", "forward\nms"), ("backward_s", "backward\nms")]
    if any(one.child("recompute") for one in layer.children):
        figures.append(("recompute_s", "recomp.\nms"))
    table = table_of("\noperator", "\npart", right=(*(title for _, title in figures), "step\ns", "\n%"))
    for one in layer.children:
        each = (_ms(one.facts[key]) for key, _ in figures)
        part = str(one.facts["part"])
        table.add_row(one.name, part, *each, significant(one.value), _share(one, step))
    sums = (_ms(sum(one.facts[key] for one in layer.children)) for key, _ in figures)
    table.add_row("total", "", *sums, significant(layer.value), _share(layer, step), style="bold")
    return table


def _around(account: TimeAccount) -> Table:
    step, within = account.step, sum(layer.value for layer in account.layers)
    named = {layer.name for layer in account.layers}
    table = table_of("what", "part", right=("s", "%"))
    for part in step.children:
        if any(one.name in named for one in part.children):
            continue
        for one in part.children or (part,):
            name = one.name if one.name != part.name else part.what
            table.add_row(name, part.name, significant(one.value), _share(one, step))
    share = f"{100 * within / step.value:.1f}"
    table.add_row("the layers, above", "", significant(within), share)
    table.add_row("the step", "", significant(step.value), "100.0", style="bold")
    return table


def _overlap_words(account: TimeAccount) -> str:
    whole = sum(one.step_s for one in account.sent if one.moment not in ("layers", "stages"))
    if not whole:
        return ""
    exposed = account.step.child("dp_comm")
    return (
        f"Weights and gradients take {significant(whole)} s per step, of which"
        f" {significant(exposed.value if exposed else 0.0)} s are exposed, including copies and the kernels that they"
        " slow down. "
    )


def _sent(rows: Sequence[Flow]) -> Table:
    table = table_of("what", "kind", right=("ranks", "nodes", "calls\n/step", "MiB", "ms", "GB/s", "s\n/step"))
    for one in rows:
        table.add_row(
            one.name,
            one.call.kind,
            f"{one.call.group.size:,}",
            f"{one.nodes:,}",
            f"{one.times * one.calls:,}",
            significant(one.call.sent_bytes / _MIB),
            _ms(one.call.call_s),
            significant(one.bytes_per_s / 1e9),
            significant(one.step_s),
        )
    return table
