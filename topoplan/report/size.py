"""How many nodes a job needs, as JSON (`topoplan.size/1`) and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from topoplan.planner.effort import Effort
from topoplan.planner.view import plan_to_dict, rounded, spec_to_dict
from topoplan.planner.what_if import SizeRow, Sizing
from topoplan.report.tables import apart, bullets, paragraph, table_of
from topoplan.report.text import (
    counted,
    effort_to_dict,
    gib,
    hours,
    layout_label,
    pauses_words,
    saving_words,
    significant,
)
from topoplan.specs.spec import Spec


def sizing_to_dict(spec: Spec, sizing: Sizing, *, price: float | None) -> dict[str, Any]:
    """Return every number of nodes searched, and the answer, or None if there is none."""
    answer, smallest = sizing.answer, sizing.smallest
    return {
        "schema": "topoplan.size/1",
        **spec_to_dict(spec),
        "steps": sizing.steps,
        "max_hours": rounded(sizing.limit_s / 3600),
        "sure": sizing.is_sure,
        "gpu_hour_price": price,
        "answer": None if answer is None else answer.nodes,
        "fits_from": None if smallest is None else smallest.nodes,
        "searched": [1, sizing.rows[-1].nodes],
        "rows": [_row_to_dict(row, sizing, price) for row in sizing.rows],
    }


def _row_to_dict(row: SizeRow, sizing: Sizing, price: float | None) -> dict[str, Any]:
    view: dict[str, Any] = {"nodes": row.nodes, "plan": None, "reason": row.found.reason}
    if (plan := row.found.best) and (effort := row.effort):
        view["plan"] = plan_to_dict(plan)
        view |= effort_to_dict(effort)
        view["hours_band"] = [rounded(bound) for bound in effort.band_hours]
        if price is not None:
            view["cost"] = rounded(effort.gpu_hours * price)
    return view


def print_sizing(console: Console, spec: Spec, sizing: Sizing, *, price: float | None) -> None:
    """Print the answer, the numbers of nodes with their best plans, and why other numbers have none."""
    cluster, job = spec.cluster, spec.job
    paragraph(
        console,
        f"{cluster.name}, nodes of {cluster.gpus_per_node} {cluster.gpu.name}: {spec.model.name}, {job.finetuning}"
        f" {job.stage} {job.precision}, {counted(sizing.steps, 'step')} of {job.global_batch_size:,} x {job.seq_len:,}"
        " tokens.",
        style="bold",
    )
    console.print()
    for sentence in _answer(sizing, price):
        paragraph(console, sentence)
    found = [row for row in sizing.rows if row.found.best]
    if found and (shown := (last := sizing.answer or found[-1]).effort):
        apart(console, _table(sizing, found, price))
        apart(
            console,
            f"hours: the whole job, on {counted(last.nodes, 'node')} with {pauses_words(spec, shown)}; band: their"
            f" error band. {saving_words(shown)}".rstrip(),
            style="dim",
        )
    reasons: dict[str, list[int]] = {}
    examples: dict[str, str] = {}
    for row in sizing.rows:
        if row.found.best is None:
            kind = "nothing fits" if row.found.is_legal else "no layout is legal"
            reasons.setdefault(kind, []).append(row.nodes)
            examples[kind] = f"{row.nodes}: {row.found.reason}"
    if reasons:
        console.print("\nRejected, and why:")
        bullets(console, (f"{kind} on {_spans(nodes)} nodes; on {examples[kind]}" for kind, nodes in reasons.items()))


def _answer(sizing: Sizing, price: float | None) -> list[str]:
    limit = f"{sizing.limit_s / 3600:g} h"
    slow = f"{'the upper end of the band' if sizing.is_sure else 'the prediction'} exceeds {limit}"
    last = sizing.rows[-1].nodes
    searched = "Searched: 1 node" if last == 1 else f"Searched: every number of nodes from 1 to {last}"
    row, sentences = sizing.answer, []
    if row is not None and (plan := row.found.best) and (effort := row.effort):
        cost = f", {effort.gpu_hours * price:,.2f} at {price:g} per GPU-hour" if price is not None else ""
        nodes = f"{counted(row.nodes, 'node')} ({counted(plan.layout.world_size, 'GPU')})"
        sentences.append(
            f"{nodes} {'is' if row.nodes == 1 else 'are'} enough: {hours(effort.hours)} h predicted, within"
            f" {_band(effort)} h, {hours(effort.gpu_hours)} GPU-h{cost}."
        )
        if row.nodes > 1:
            sentences.append(f"With fewer, {_lacking(sizing.rows[: row.nodes - 1], slow)}.")
        if not sizing.is_sure and effort.band_hours[1] > sizing.limit_s / 3600:
            sentences.append(f"The upper end of the band exceeds {limit}; --sure finds the nodes that keep it below.")
    else:
        lacking = _lacking(sizing.rows, slow)
        sentences.append(f"With up to {counted(last, 'node')}, {lacking}; --max-nodes N tries more.")
        timed = [row for row in sizing.rows if row.found.best]
        if timed:
            best = min(timed, key=sizing.hours)
            sentences.append(f"The closest is {hours(sizing.hours(best))} h on {counted(best.nodes, 'node')}.")
    smallest = sizing.smallest
    fits = f"the job fits from {counted(smallest.nodes, 'node')} on" if smallest else "the job fits on none of them"
    sentences.append(f"{searched}; {fits}.")
    return sentences


def _lacking(rows: Sequence[SizeRow], slow: str) -> str:
    """Return why these numbers of nodes are not enough: `slow`, or that nothing fits on them."""
    have_a_plan = [row.found.best is not None for row in rows]
    if not any(have_a_plan):
        return "nothing fits"
    return slow if all(have_a_plan) else f"nothing fits, or {slow}"


def _band(effort: Effort) -> str:
    return "-".join(hours(bound) for bound in effort.band_hours)


def _table(sizing: Sizing, rows: Sequence[SizeRow], price: float | None) -> Table:
    headers = ["GPUs", "GiB", "step s", "tok/s", "hours", "band", "GPU-h", *(["cost"] if price is not None else [])]
    table = table_of("nodes", "best plan", right=headers)
    for row in rows:
        plan, effort = row.found.best, row.effort
        if plan is None or effort is None:
            continue
        cost = [] if price is None else [f"{effort.gpu_hours * price:,.0f}"]
        table.add_row(
            str(row.nodes),
            layout_label(plan.layout),
            f"{plan.layout.world_size:,}",
            gib(plan.memory.device_bytes),
            significant(plan.time.step_s),
            f"{plan.tokens_per_s_per_gpu * plan.layout.world_size:,.0f}",
            hours(effort.hours),
            _band(effort),
            hours(effort.gpu_hours),
            *cost,
            style="bold" if row == sizing.answer else None,
        )
    return table


def _spans(numbers: Sequence[int]) -> str:
    """Return `1-3, 5, 7-9`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
