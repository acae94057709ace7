"""Changes of the best plan, as JSON (`topoplan.what-if/1`) and as text: two columns, or a table of many cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.layout.forms import layout_to_dict
from topoplan.planner.effort import job_effort
from topoplan.planner.explain import EQUAL, speed_words
from topoplan.planner.plan import Plan
from topoplan.planner.view import plan_to_dict, rounded, spec_to_dict
from topoplan.planner.what_if import Fate, Found, Outcome
from topoplan.report.dump import picked
from topoplan.report.tables import Column, apart, bullets, fitting, paragraph, table_of
from topoplan.report.text import effort_to_dict, gib, hours, layout_label, significant, spec_line, trainer_title
from topoplan.specs.spec import Spec

_T = TypeVar("_T")
_FIGURES = {
    "trainer": 1,
    "GPUs": 2,
    "GiB": 1,
    "step\ns": 0,
    "tok/s": 3,
    "tok/s\n/GPU": 0,
    "hours": 0,
    "GPU-h": 4,
    "old\nbest": 0,
}
"""Figure columns and their priority: on a narrow terminal, those with the highest number are dropped first."""
_LEAST = {"trainer": 2, "hours": 1, "GPU-h": 1}
"""Number of different values from which a column is shown: hours are often unknown, and the trainer the same."""
_MIN_LABEL = 17
"""Minimum width of the layout column; below it, figure columns are dropped."""


def outcomes_to_dict(spec: Spec, before: Found, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the spec with its best plan, and every case with its best plan and the fate of the original one."""
    return {
        "schema": "topoplan.what-if/1",
        **spec_to_dict(spec),
        "before": _found_to_dict(before),
        "cases": [
            {
                "set": dict(case.changes),
                **_found_to_dict(case.found),
                "old_best": None if case.fate is None else _fate_to_dict(case.fate),
            }
            for case in outcomes
        ],
    }


def _found_to_dict(found: Found) -> dict[str, Any]:
    view: dict[str, Any] = {"plan": None, "reason": found.reason, "counts": None}
    if found.spec is not None:
        view |= picked(found.spec.cluster, "nodes gpus=world_size")
        view["counts"] = picked(found.counts, "candidates illegal out_of_memory ranked")
        if found.best is not None:
            own = {"trainer": found.best.trainer} | effort_to_dict(job_effort(found.spec, found.best))
            view["plan"] = plan_to_dict(found.best) | own
    return view


def _fate_to_dict(fate: Fate) -> dict[str, Any]:
    return {
        "id": None if fate.layout is None else fate.layout.id,
        "layout": None if fate.layout is None else layout_to_dict(fate.layout),
        "rank": fate.rank,
        "slower": None if fate.plan is None else rounded(fate.slower),
        **picked(fate, "rule reason fix"),
    }


def print_outcomes(
    console: Console, spec: Spec, before: Found, outcomes: Sequence[Outcome], ways_out: str = ""
) -> None:
    """Print the spec, then before and after for a single case, or a row per case. `ways_out` is the command that shows
    what would make the first case fit in which nothing does; empty if there is none."""
    paragraph(console, f"{spec_line(spec)}.", style="bold")
    if len(outcomes) == 1:
        _print_one(console, before, outcomes[0])
    else:
        _print_many(console, before, outcomes)
    if note := _batch_note(before, outcomes):
        apart(console, note)
    if ways_out:
        console.print("\nThis shows what would fit:")
        console.print(Text(ways_out), soft_wrap=True)


def _print_one(console: Console, before: Found, case: Outcome) -> None:
    paragraph(console, f"What if {_words(case.changes)}?")
    for name, found in (("before", before), ("after", case.found)):
        if found.best is None:
            apart(console, f"{name}: {found.reason}")
    if before.best or case.found.best:
        apart(console, _two_columns(before, case.found))
    if before.best and case.fate:
        is_same = case.found.best is not None and case.found.best.layout == before.best.layout
        fate = "is still the best" if is_same else _fate(case.fate)
        apart(console, f"The previous best plan, {layout_label(before.best.layout)}, {fate}.")


def _words(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items())


def _two_columns(before: Found, after: Found) -> Table:
    table = table_of("figure", right=("before", "after", "change"))
    for column in table.columns[1:3]:
        column.no_wrap, column.overflow = False, "fold"
    sides = [(found.spec, found.best) for found in (before, after)]

    def each(of: Callable[[Spec, Plan], _T | None]) -> list[_T | None]:
        return [None if spec is None or plan is None else of(spec, plan) for spec, plan in sides]

    def row(name: str, values: Sequence[float | None], text: Callable[[float], str], *, absolute: bool = False) -> None:
        one, two = values
        if one is None and two is None:
            return
        change = ""
        if one and two is not None and abs(two / one - 1) >= EQUAL:
            change = f"{100 * (two / one - 1):+.0f}%"
            if absolute:
                change = f"{'+' if two > one else '-'}{text(abs(two - one))}, {change}"
        table.add_row(name, *("-" if value is None else text(value) for value in (one, two)), change)

    labels = ["none" if plan is None else layout_label(plan.layout) for _, plan in sides]
    table.add_row("best plan", *labels, "same" if labels[0] == labels[1] else "")
    trainers = each(lambda _, plan: trainer_title(plan))
    if None not in trainers and len({*trainers}) > 1:
        table.add_row("trainer", *(title or "" for title in trainers), "")
    row("GPUs", each(lambda spec, plan: spec.cluster.world_size), lambda value: f"{value:,.0f}")
    row("step, s", each(lambda spec, plan: plan.time.step_s), significant)
    row("tokens/s", each(lambda spec, plan: plan.tokens_per_s_per_gpu * spec.cluster.world_size), lambda x: f"{x:,.0f}")
    row("tokens/s per GPU", each(lambda spec, plan: plan.tokens_per_s_per_gpu), lambda value: f"{value:,.0f}")
    row("MFU, %", each(lambda spec, plan: 100 * plan.mfu), lambda value: f"{value:.1f}")
    row("memory, GiB", each(lambda spec, plan: plan.memory.device_bytes), gib)
    if len({plan.memory.capacity_bytes for _, plan in sides if plan}) > 1:
        row("of a card's", each(lambda spec, plan: plan.memory.capacity_bytes), gib)
    efforts = each(job_effort)
    row("hours", [effort.hours if effort else None for effort in efforts], hours, absolute=True)
    row("GPU-hours", [effort.gpu_hours if effort else None for effort in efforts], hours, absolute=True)
    return table


def _fate(fate: Fate) -> str:
    """Describe what becomes of the old best plan, as words that follow its name."""
    if fate.reason:
        verb = "does not fit" if fate.rule == "memory" else "is illegal"
        return f"{verb}: {fate.reason}{f'; {fate.fix}' if fate.fix else ''}"
    becomes = layout_label(fate.layout) if fate.layout else ""
    if fate.rank == 1:
        return f"is still the best, as {becomes}"
    speed = _speed(fate, decimals=1)
    speed += " as the best" if speed == "as fast" else " than the best"
    where = f"plan {fate.rank}" if fate.rank else "skipped by the search"
    return f"becomes {becomes}: {where}, {speed}"


def _short_fate(fate: Fate | None) -> str:
    if fate is None:
        return "-"
    if fate.reason:
        return "does not fit" if fate.rule == "memory" else "not allowed"
    if fate.rank == 1:
        return "still best"
    return _speed(fate)


def _speed(fate: Fate, *, decimals: int = 0) -> str:
    """Compare the old best plan with the new one."""
    return speed_words(1.0 / (1.0 - fate.slower), decimals)


def _print_many(console: Console, before: Found, outcomes: Sequence[Outcome]) -> None:
    tried = {key: list(dict.fromkeys(case.changes[key] for case in outcomes)) for key in outcomes[0].changes}
    keys = [key for key, values in tried.items() if len(values) > 1]
    old = before.best
    paragraph(console, f"What if {_words({key: ','.join(values) for key, values in tried.items()})}?")
    console.print()
    rows = [_figures(["unchanged", *[""] * (len(keys) - 1)], before, "")]
    rows += [_figures([case.changes[key] for key in keys], case.found, _short_fate(case.fate)) for case in outcomes]
    console.print(_table(keys, rows, console.width))
    console.print()
    if old is not None:
        paragraph(
            console,
            f"old best: {layout_label(old.layout)} with its dp adapted, compared with the best plan of the row.",
            style="dim",
        )
    out = [
        f"{_words({key: case.changes[key] for key in keys})}: {text}"
        for case in outcomes
        for text in (
            case.found.reason,
            f"the old best {_fate(case.fate)}" if case.fate and case.fate.reason and case.found.best else "",
        )
        if text
    ]
    if out:
        console.print("\nRejected, and why:")
        bullets(console, out)


def _figures(values: Sequence[str], found: Found, fate: str) -> tuple[list[str], str, list[str]]:
    spec, plan = found.spec, found.best
    gpus = "-" if spec is None else f"{spec.cluster.world_size:,}"
    if spec is None or plan is None:
        return list(values), "nothing fits" if found.is_legal else "nothing legal", ["-", gpus, *["-"] * 6, fate]
    effort = job_effort(spec, plan)
    figures = [
        trainer_title(plan),
        gpus,
        gib(plan.memory.device_bytes),
        significant(plan.time.step_s),
        f"{plan.tokens_per_s_per_gpu * spec.cluster.world_size:,.0f}",
        f"{plan.tokens_per_s_per_gpu:,.0f}",
        *((hours(effort.hours), hours(effort.gpu_hours)) if effort else ("-", "-")),
        fate,
    ]
    return list(values), layout_label(plan.layout), figures


def _table(keys: Sequence[str], rows: Sequence[tuple[list[str], str, list[str]]], width: int) -> Table:
    figures = [
        Column(header=header, cells=cells, left=header == "trainer", drop=drop)
        for (header, drop), cells in zip(_FIGURES.items(), zip(*(row[2] for row in rows), strict=True), strict=True)
        if len({*cells} - {"-"}) >= _LEAST.get(header, 0)
    ]
    named = [Column(header=key, cells=tuple(row[0][number] for row in rows)) for number, key in enumerate(keys)]
    shown = fitting(figures, width - _MIN_LABEL - sum(column.width for column in named))
    table = table_of(*(f"\n{key.rpartition('.')[2]}" for key in keys), "\nbest plan")
    for column in shown:
        header = column.header if "\n" in column.header else f"\n{column.header}"
        table.add_column(Text(header), justify="left" if column.left else "right", no_wrap=True)
    for number, (values, label, _) in enumerate(rows):
        table.add_row(*values, label, *(column.cells[number] for column in shown))
    return table


def _batch_note(before: Found, outcomes: Sequence[Outcome]) -> str:
    """Note that the batch stays constant while the number of GPUs changes, and which GPU counts do not divide it."""
    if before.spec is None or any("global_batch_size" in key for key in outcomes[0].changes):
        return ""
    batch, gpus = before.spec.job.global_batch_size, before.spec.cluster.world_size
    sizes = sorted({case.found.spec.cluster.world_size for case in outcomes if case.found.spec})
    if sizes in ([], [gpus]):
        return ""
    text = f"global_batch_size stays at {batch:,} sequences, and must be divisible by micro_batch_size x dp"
    if odd := [size for size in sizes if batch % size]:
        text += f"; it is not a multiple of {', '.join(map(str, odd))} GPUs, where tp, pp or cp must take a factor"
    return f"{text}. --set global_batch_size=N changes it."
