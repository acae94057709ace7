"""A timeline as text, its summary as JSON (`topoplan.timeline/1`), and as a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.engines.timeline import Event, Timeline
from topoplan.planner.plan import Plan
from topoplan.planner.view import plan_to_dict, rounded, spec_to_dict
from topoplan.report.dump import picked, plain
from topoplan.report.tables import apart, paragraph
from topoplan.report.text import counted, layout_label, significant, spec_line
from topoplan.specs.spec import Spec

# Letter in the terminal, color, and name in the legend. Chunks after the first use the lowercase letter.
MARKS = {
    "forward": ("F", "blue", "forward"),
    "backward": ("B", "green", "backward"),
    "recompute": ("R", "cyan", "recomputation"),
    "p2p": ("-", "yellow", "message between stages"),
    "idle": (".", "dim", "idle"),
    "reference": ("x", "magenta", "reference model"),
    "layer collectives": ("t", "yellow", "collectives in layers"),
    "gradient reduce": ("g", "red", "gradients reduced"),
    "optimizer": ("o", "magenta", "optimizer"),
    "parameter gather": ("w", "red", "weights gathered"),
    "buffers": ("u", "cyan", "copies into and out of buffers"),
    "launches": ("l", "yellow", "waiting for the host's launches"),
    "copy": ("c", "yellow", "copies over PCIe"),
    "host work": ("h", "magenta", "host work of a step"),
}
NUMBERED = ("forward", "recompute", "backward")
"""Kinds of event that are work on a micro-batch."""
_Span = tuple[str, float, float]
"""Kind, start and end."""
_CUT = " ~ "
_PER_FORWARD = 1.0


def timeline_to_dict(spec: Spec, plan: Plan, drawn: Timeline) -> dict[str, Any]:
    """Return the plan, each rank's time by kind, and the error of the ranking's formula; times in seconds."""
    seconds, idle = plain(drawn.busy), plain(drawn.idle_shares)
    view: dict[str, Any] = {"total_s": rounded(drawn.total_s), "predicted_s": rounded(plan.time.step_s)}
    if drawn.lanes:
        view |= {
            **picked(drawn, "deviation microbatches"),
            "lanes": [
                {"lane": lane, "seconds": seconds[number], "idle": idle[number]}
                for number, lane in enumerate(drawn.lanes)
            ],
        }
    else:
        view |= {
            "pipeline": picked(
                drawn,
                "start_s=pipeline_start_s simulated_s=pipeline_s closed_form_s deviation microbatches chunks",
            ),
            "phases": [picked(phase, "name start_s end_s") for phase in drawn.phases],
            "ranks": [{"rank": rank, "seconds": seconds[rank], "bubble": idle[rank]} for rank in range(drawn.ranks)],
            "collectives": [picked(one, "name rank") | {"seconds": plain(one.seconds)} for one in drawn.communications],
        }
    return {"schema": "topoplan.timeline/1", **spec_to_dict(spec), "plan": plan_to_dict(plan), "timeline": view}


def totals_line(plan: Plan, drawn: Timeline) -> str:
    """Return a line that compares the simulated step with the predicted one."""
    off = round(100 * drawn.deviation, 1) or 0.0  # avoids -0.0
    if drawn.lanes:
        return (
            f"Step {significant(drawn.total_s, 4)} s simulated layer by layer, {significant(plan.time.step_s, 4)} s by"
            f" the ranking's formula ({off:+.1f}%)."
        )
    simulated, ranked = significant(drawn.pipeline_s, 4), significant(drawn.closed_form_s, 4)
    return (
        f"Step {significant(drawn.total_s, 4)} s simulated, {significant(plan.time.step_s, 4)} s as ranked:"
        f" the pipeline takes {simulated} s, {ranked} s by the ranking's formula ({off:+.1f}%)."
    )


def print_timeline(console: Console, spec: Spec, plan: Plan, drawn: Timeline) -> None:
    """Print a line per pipeline rank, as wide as the console, then the legend and the totals."""
    paragraph(console, f"{spec_line(spec)}.", style="bold")
    batches = "1 micro batch" if drawn.microbatches == 1 else f"{drawn.microbatches} micro batches"
    who = f"{counted(drawn.ranks, 'pipeline rank')} x {counted(drawn.chunks, 'chunk')}"
    if drawn.lanes:
        gpus = plan.layout.world_size
        who = "one GPU" if gpus == 1 else f"one of {gpus:,} GPUs, which all do the same"
    paragraph(console, f"Plan {layout_label(plan.layout)}: {who}, {batches} per step.")
    names, idle = lane_names(drawn), idle_name(drawn)
    label = max(map(len, (*names, *(one.name for one in drawn.communications))))
    columns = console.width - label - len(" bubble") - 2
    shown, column_s = windows(drawn, columns - len(_CUT), _PER_FORWARD)
    counts = [max(1, round((window.end_s - window.start_s) / column_s)) for window in shown]
    console.print()
    console.print(Text(f"{'':{label}} {_ruler(shown, counts):{columns}} {idle:>6}", style="dim"))
    shares = drawn.idle_shares
    marked = 0 if drawn.lanes else shares.index(max(shares))
    for rank, events in enumerate(drawn.by_rank()):
        line = _line(f"{names[rank]:>{label}} ", _work(drawn, events), shown, counts)
        line.append(" " * (label + 1 + columns - len(line)))
        line.append(f" {100 * shares[rank]:5.1f}%", style="bold" if rank == marked else "")
        console.print(line)
    for communication in drawn.communications:
        spans = [(span.name, span.start_s, span.end_s) for span in communication.spans]
        console.print(_line(f"{communication.name:>{label}} ", spans, shown, counts))
    apart(console, _legend(drawn, shown, column_s), style="dim")
    paragraph(console, totals_line(plan, drawn))


def _work(drawn: Timeline, events: Sequence[Event]) -> list[_Span]:
    """Return a rank's spans; the kind ends in ' if the event belongs to a chunk after the first."""
    spans = [
        (f"{event.kind}'" if event.chunk and event.kind in NUMBERED else event.kind, event.start_s, event.end_s)
        for event in events
    ]
    return [*spans, *((phase.name, phase.start_s, phase.end_s) for phase in drawn.phases)]


def _line(name: str, spans: Sequence[_Span], shown: Sequence[Window], counts: Sequence[int]) -> Text:
    line = Text(name)
    for number, (window, count) in enumerate(zip(shown, counts, strict=True)):
        line.append(_CUT if number else "")
        for kind in _cells(spans, window, count):
            mark, style, _ = MARKS[kind.removesuffix("'")]
            line.append(mark.lower() if kind.endswith("'") else mark, style=style)
    return line


def lane_names(drawn: Timeline) -> tuple[str, ...]:
    """Return the labels at the start of the lines."""
    return drawn.lanes or tuple(map(str, range(drawn.ranks)))


def idle_name(drawn: Timeline) -> str:
    """Return the header of the column of idle shares."""
    return "idle" if drawn.lanes else "bubble"


def talks_words(drawn: Timeline) -> str:
    """Describe the communication lines below the ranks."""
    ranks = dict.fromkeys(one.rank for one in drawn.communications)
    who = " and ".join(f"rank {rank}" for rank in ranks) if drawn.ranks > 1 else "a GPU"
    return f"Lower lines: what {who} sends, hidden behind its work or not"


def _ruler(shown: tuple[Window, ...], counts: list[int]) -> str:
    parts = []
    for window, count in zip(shown, counts, strict=True):
        left, right = f"{significant(window.start_s)} s", f"{significant(window.end_s)} s"
        parts.append(f"{left}{right:>{max(0, count - len(left))}}" if len(left + right) < count else " " * count)
    return _CUT.join(parts)


def _cells(spans: Sequence[_Span], window: Window, count: int) -> list[str]:
    """Return one kind per column. Each column gets the kind that is most underrepresented so far, so that events
    narrower than a column are also shown in proportion to their time."""
    width = (window.end_s - window.start_s) / count
    filled: list[dict[str, float]] = [{} for _ in range(count)]

    def add(kind: str, start: float, end: float) -> None:
        first = max(0, int((start - window.start_s) / width))
        for column in range(first, min(count, int((end - window.start_s) / width) + 1)):
            left = window.start_s + column * width
            inside = min(end, left + width) - max(start, left)
            if inside > 0.0:
                filled[column][kind] = filled[column].get(kind, 0.0) + inside

    for kind, start, end in spans:
        if end > window.start_s and start < window.end_s:
            add(kind, start, end)
    cells: list[str] = []
    owed: dict[str, float] = {}
    for column in filled:
        column["idle"] = max(0.0, width - sum(column.values()))
        for kind, seconds in column.items():
            owed[kind] = owed.get(kind, 0.0) + seconds
        cells.append(max((kind for kind in column if column[kind] > 0.0), key=owed.__getitem__))
        owed[cells[-1]] -= width
    return cells


def _legend(drawn: Timeline, shown: tuple[Window, ...], column_s: float) -> str:
    kinds = kinds_of(drawn)
    words = ", ".join(f"{mark} {what}" for kind, (mark, _, what) in MARKS.items() if kind in kinds)
    text = f"{words}."
    if drawn.chunks > 1:
        text += " Small letters: chunks beyond the first."
    text += f" A column is {significant(1e3 * column_s)} ms; what is narrower gets its share of the columns."
    if len(shown) > 1:
        left_out_s = shown[1].start_s - shown[0].end_s
        text += f" At ~ {significant(left_out_s)} s of the steady state are left out."
    if drawn.communications:
        text += f" {talks_words(drawn)}."
    if drawn.lanes:
        return f"{text} idle: share of the step in which there is nothing to do."
    return f"{text} bubble: share of the pipeline's time in which the rank is idle."


def kinds_of(drawn: Timeline) -> set[str]:
    """Return all kinds of event that appear in the drawing."""
    kinds = {kind for mine in drawn.busy for kind, seconds in mine.items() if seconds > 0.0}
    return kinds | {
        span.name for spans in (drawn.phases, *(one.spans for one in drawn.communications)) for span in spans
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A drawn interval of time."""

    start_s: float
    end_s: float


def windows(timeline: Timeline, units: int, per_forward: float) -> tuple[tuple[Window, ...], float]:
    """Return (windows, seconds per unit): the whole step if it fits in `units`, otherwise its two ends.

    A forward pass of one chunk should be `per_forward` units wide on average. A short step is drawn wider; of a long
    one, the middle of the steady state is left out. If even the two ends do not fit, the scale shrinks until the
    pipeline's fill and drain do.
    """
    total = timeline.total_s
    widths = [event.end_s - event.start_s for event in timeline.events if event.kind == "forward"]
    unit_s = sum(widths) / len(widths) / per_forward
    if total <= units * unit_s:
        return (Window(start_s=0.0, end_s=total),), total / units
    ends = timeline.fill_s + max(0.0, total - timeline.drain_s)
    unit_s = max(unit_s, min(total, 1.25 * ends) / units)
    if total <= units * unit_s * 1.000001:
        return (Window(start_s=0.0, end_s=total),), total / units
    # The space left over by fill and drain is divided between them.
    spare = (units * unit_s - ends) / 2
    first = timeline.fill_s + spare
    return (
        Window(start_s=0.0, end_s=first),
        Window(start_s=total - (units * unit_s - first), end_s=total),
    ), unit_s


MARK = '{"otherData": {"writer": "topoplan timeline"'
"""The start of every trace written by topoplan."""


def trace(title: str, plan: Plan, drawn: Timeline) -> str:
    """Return the trace file: one process, a thread per pipeline rank or lane, one event per line.

    Source: "Trace Event Format" (Google, 2016): complete events (`ph` X) with `ts` and `dur` in microseconds, names of
    processes and threads as metadata events (`ph` M).
    """
    head = {
        "writer": "topoplan timeline",
        "title": title,
        "plan": plan.id,
        "simulated_s": drawn.total_s,
        "predicted_s": plan.time.step_s,
    }
    lines = [json.dumps(event, allow_nan=False) for event in _events(plan, drawn)]
    return (
        f'{{"otherData": {json.dumps(head, allow_nan=False)}, "displayTimeUnit": "ms", "traceEvents": [\n'
        + ",\n".join(lines)
        + "\n]}\n"
    )


def _events(plan: Plan, drawn: Timeline) -> list[dict[str, Any]]:
    found = [_named(0, "process_name", name=f"step of {plan.id}")]
    for rank in range(drawn.ranks):
        found.append(_named(rank, "thread_name", name=drawn.lanes[rank] if drawn.lanes else f"pipeline rank {rank}"))
        found.append(_named(rank, "thread_sort_index", sort_index=rank))
    for event in drawn.events:
        details = {"micro batch": event.microbatch}
        if not drawn.lanes:
            details |= {"chunk": event.chunk, "virtual stage": event.chunk * drawn.ranks + event.rank}
        found.append(_complete(event.kind, event.rank, event.start_s, event.end_s) | {"args": details})
    for phase in drawn.phases:
        found += [_complete(phase.name, rank, phase.start_s, phase.end_s) for rank in range(drawn.ranks)]
    for number, communication in enumerate(drawn.communications, start=drawn.ranks):
        found.append(_named(number, "thread_name", name=f"{communication.name}, rank {communication.rank}"))
        found.append(_named(number, "thread_sort_index", sort_index=number))
        found += [_complete(span.name, number, span.start_s, span.end_s) for span in communication.spans]
    return found


def _named(thread: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": args}


def _complete(name: str, rank: int, start_s: float, end_s: float) -> dict[str, Any]:
    """Return a complete event in whole nanoseconds, so that adjacent events neither overlap nor leave a gap."""
    start, end = round(1e9 * start_s), round(1e9 * end_s)
    return {
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "cat": name,
        "name": name,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
    }
