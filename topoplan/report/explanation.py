"""A plan explained, as JSON and as text: its time, its memory, or both; and two plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from topoplan.engines.account import MemoryAccount, TimeAccount
from topoplan.engines.registry import engine_of
from topoplan.planner.account import Comparison
from topoplan.planner.effort import job_effort
from topoplan.planner.explain import speed_words
from topoplan.planner.lengths import data_notes
from topoplan.planner.plan import Plan
from topoplan.planner.rank import why_preferred
from topoplan.planner.view import plan_to_dict, rounded, spec_to_dict
from topoplan.report.memory import memory_to_dict, print_memory
from topoplan.report.tables import bullets, heading, paragraph, table_of
from topoplan.report.text import band, gib, hours, layout_label, significant, spec_line
from topoplan.report.time import print_time, time_to_dict
from topoplan.specs.gpu_profile import notes_on_bands
from topoplan.specs.spec import Spec
from topoplan.terms import Difference
from topoplan.trainers.case import case_of
from topoplan.units import GIB


def explanation_to_dict(
    spec: Spec, plan: Plan, *, time: TimeAccount | None, memory: MemoryAccount | None
) -> dict[str, Any]:
    """Return the plan with the terms of its time and its memory; None leaves one out."""
    view: dict[str, Any] = {"schema": "topoplan.explain/2", **spec_to_dict(spec), "plan": plan_to_dict(plan)}
    if notes := data_notes(spec, plan):
        view["data_notes"] = list(notes)
    view["notes"] = list(_notes(spec, plan))
    if time is not None:
        view["time"] = time_to_dict(plan, time)
    if memory is not None:
        view["memory"] = memory_to_dict(plan, memory)
    return view


def _notes(spec: Spec, plan: Plan) -> tuple[str, ...]:
    """Return notes on the constants behind the plan: a user's own file, and borrowed bands."""
    case = case_of(spec, plan.layout.backend)
    return notes_on_bands(case.profile, case.cluster.gpu.name, engine_of(plan.layout.backend).bands(case))


def print_explanation(
    console: Console, spec: Spec, plan: Plan, *, time: TimeAccount | None, memory: MemoryAccount | None
) -> None:
    """Print the plan, then its time by part, then its memory by part; None leaves one out."""
    paragraph(console, f"{spec_line(spec)}.", style="bold")
    verdict = "fits" if plan.fits else "does not fit"
    used = plan.memory
    width = band(plan.time, ascii_only=console.options.ascii_only)
    paragraph(
        console,
        f"Plan {layout_label(plan.layout)} {verdict}: {gib(used.device_bytes)} GiB of {gib(used.capacity_bytes)},"
        f" margin {gib(used.margin_bytes)}. A step takes {significant(plan.time.step_s)} s {width},"
        f" {plan.tokens_per_s_per_gpu:,.0f} tokens/s per GPU.",
    )
    for note in dict.fromkeys((*_notes(spec, plan), *plan.warnings, *plan.caveats)):
        paragraph(console, f"Note: {note}.")
    bullets(console, data_notes(spec, plan))
    if time is not None:
        print_time(console, plan, time)
    if memory is not None:
        print_memory(console, plan, memory)


_SMALLEST_SHARE = 0.1
"""Share of all differences below which a reason is left out of the sentence."""
_MOST_REASONS = 3


def comparison_to_dict(spec: Spec, comparison: Comparison, *, time: bool, memory: bool) -> dict[str, Any]:
    """Return both plans and their differences: pairs of values, and how much larger the second is."""
    differences: dict[str, Any] = {"layout": {key: list(pair) for key, pair in comparison.layout.items()}}
    if time:
        differences["time_s"] = [_row_to_dict(row, 1.0) for row in comparison.time]
    if memory:
        differences["memory_gib"] = [_row_to_dict(row, GIB) for row in comparison.memory]
    return {
        "schema": "topoplan.versus/1",
        **spec_to_dict(spec),
        "plan": plan_to_dict(comparison.first),
        "versus": plan_to_dict(comparison.second),
        "differences": differences,
        "winner": comparison.winner.id,
        "verdict": verdict(comparison),
    }


def _row_to_dict(row: Difference, unit: float) -> dict[str, Any]:
    return {
        "name": row.name,
        "plan": rounded(row.first / unit),
        "versus": rounded(row.second / unit),
        "more": rounded(row.more / unit),
    }


def verdict(comparison: Comparison, *, ascii_only: bool = False) -> list[str]:
    """Say which plan is better, why, and at what cost."""
    winner, loser = comparison.winner, comparison.loser
    name, other = layout_label(winner.layout), layout_label(loser.layout)
    time = loser.tokens_per_s_per_gpu / winner.tokens_per_s_per_gpu
    speed = speed_words(time, decimals=1)
    sentences = []
    if not winner.fits:
        sentences.append(f"Neither plan fits; {name} would be {speed}.")
    elif not loser.fits:
        over = loser.memory.excess_bytes
        lacks = f"exceeds the card by {gib(over)} GiB" if over > 0 else "needs more host memory than a node has"
        sentences.append(f"{name} wins, because {other} {lacks}; it is {speed}.")
    elif comparison.is_tie:
        sentences.append(
            f"Both are equally fast within the error of the predictions ({abs(time - 1.0):.1%} apart); {name} is ranked"
            f" first because it {why_preferred(winner, loser)}."
        )
    elif time > 1.0:
        sentences.append(f"{name} is ranked first, though it is {speed}, because a known problem applies to {other}.")
    else:
        sentences.append(f"{name} wins: it is {speed}.")
    flip = 1.0 if winner is comparison.first else -1.0
    sentences += _reasons(comparison.time, flip, "s per step", significant)
    sentences += _reasons(comparison.memory, flip, "GiB", gib)
    if not comparison.is_tie:
        width = band(winner.time, ascii_only=ascii_only)
        if comparison.share_a_model:
            words = (
                f"Each prediction has an error band of {width}. The errors are mostly shared, so the order is more"
                " certain than the speeds."
            )
        else:
            words = (
                f"The predictions have error bands of {width} and {band(loser.time, ascii_only=ascii_only)}, from two"
                " cost models with few errors in common: the order is no more certain than the speeds."
            )
        sentences.append(words)
    return sentences


def _reasons(rows: Iterable[Difference], flip: float, unit: str, text: Callable[[float], str]) -> list[str]:
    """Return one sentence on where the winner takes less and where it takes more, largest first."""
    gains = [(flip * row.more, row.name) for row in rows]
    moved = sum(abs(gain) for gain, _ in gains)
    total = sum(gain for gain, _ in gains)
    large = [(gain, name) for gain, name in gains if abs(gain) >= _SMALLEST_SHARE * moved and text(abs(gain)) != "0.0"]
    saved = [f"{text(gain)} in {name}" for gain, name in large if gain > 0][:_MOST_REASONS]
    paid = [f"{text(-gain)} in {name}" for gain, name in large if gain < 0][:_MOST_REASONS]
    if not saved and not paid:
        return []
    sentence = f"It takes {text(abs(total))} {unit} {'less' if total >= 0 else 'more'}"
    halves = [f"{word} {', '.join(items)}" for word, items in (("saves", saved), ("adds", paid)) if items]
    return [f"{sentence}: it {' and '.join(halves if total >= 0 else halves[::-1])}."]


def print_comparison(console: Console, spec: Spec, comparison: Comparison, *, time: bool, memory: bool) -> None:
    """Print the verdict, then the differences in layout, figures, parts of the step and parts of memory."""
    first, second = comparison.first, comparison.second
    paragraph(console, f"{spec_line(spec)}.", style="bold")
    paragraph(console, f"A: {layout_label(first.layout)}")
    paragraph(console, f"B: {layout_label(second.layout)}")
    console.print()
    for sentence in verdict(comparison, ascii_only=console.options.ascii_only):
        paragraph(console, sentence)
    heading(console, "Layout keys that differ")
    table = table_of("key", "A", "B")
    for key, (one, two) in comparison.layout.items():
        table.add_row(key, _value(one), _value(two))
    console.print(table)
    heading(console, "Figures")
    console.print(_figures(spec, first, second))
    if time:
        heading(console, "Parts of a step, s")
        decimals = len(significant(min(first.time.step_s, second.time.step_s), 4).partition(".")[2])
        console.print(_table(comparison.time, lambda seconds: f"{seconds:,.{decimals}f}", "step"))
    if memory:
        heading(console, "Memory of the fullest GPU, GiB")
        console.print(_table(comparison.memory, lambda size: f"{size / GIB:.2f}", "device"))
    console.print()
    beyond = " Beyond tensors: fragmentation, CUDA context, NCCL." if memory else ""
    paragraph(
        console,
        f"Largest difference first.{beyond} `topoplan explain` of one plan shows where each figure comes from.",
        style="dim",
    )


def _value(value: Any) -> str:
    if isinstance(value, dict):
        words = [", ".join(item) if isinstance(item, list) else str(item) for item in value.values()]
        return " ".join(words)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value is None else str(value)


def _figures(spec: Spec, first: Plan, second: Plan) -> Table:
    table = table_of("figure", right=("A", "B", "B - A"))

    def row(name: str, of: Callable[[Plan], float], text: Callable[[float], str]) -> None:
        compared(name, of(first), of(second), text)

    def compared(name: str, one: float, two: float, text: Callable[[float], str]) -> None:
        table.add_row(name, text(one), text(two), _signed(two - one, text))

    row("step, s", lambda plan: plan.time.step_s, significant)
    row("tokens/s", lambda plan: plan.tokens_per_s_per_gpu * plan.layout.world_size, lambda x: f"{x:,.0f}")
    row("tokens/s per GPU", lambda plan: plan.tokens_per_s_per_gpu, lambda x: f"{x:,.0f}")
    row("MFU, %", lambda plan: 100 * plan.mfu, lambda x: f"{x:.1f}")
    if (one := job_effort(spec, first)) and (two := job_effort(spec, second)):
        compared("hours", one.hours, two.hours, hours)
    row("memory, GiB", lambda plan: plan.memory.device_bytes, gib)
    table.add_row("fits", *("yes" if plan.fits else "no" for plan in (first, second)), "")
    return table


def _signed(value: float, text: Callable[[float], str]) -> str:
    """Format a value with its sign; what rounds to zero has none."""
    shown = text(abs(value))
    return f"{'+' if value > 0 else '-'}{shown}" if shown.strip("0.") else "0"


def _table(rows: Iterable[Difference], text: Callable[[float], str], total: str) -> Table:
    table = table_of("part", right=("A", "B", "B - A"))
    rows = list(rows)
    for row in rows:
        cells = [text(value) if value else "-" for value in (row.first, row.second)]
        table.add_row(row.name, *cells, _signed(row.more, text))
    first, second = sum(row.first for row in rows), sum(row.second for row in rows)
    table.add_row(total, text(first), text(second), _signed(second - first, text), style="bold")
    return table
