"""A timeline as text, and its summary as JSON (`topoplan.timeline/1`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.engines.timeline import Event, Timeline
from topoplan.planner.plan import Plan
from topoplan.planner.view import plan_to_dict, rounded, spec_to_dict
from topoplan.report.dump import picked, plain
from topoplan.report.tables import apart, paragraph
from topoplan.report.text import counted, layout_label, significant, spec_line
from topoplan.report.windows import Window, windows
from topoplan.specs.spec import Spec

SCHEMA = "topoplan.timeline/1"

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
    return {"schema": SCHEMA, **spec_to_dict(spec), "plan": plan_to_dict(plan), "timeline": view}


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
    """Return the start and end times above each window."""
    parts = []
    for window, count in zip(shown, counts, strict=True):
        left, right = f"{significant(window.start_s)} s", f"{significant(window.end_s)} s"
        parts.append(f"{left}{right:>{max(0, count - len(left))}}" if len(left + right) < count else " " * count)
    return _CUT.join(parts)


def _cells(spans: Sequence[_Span], window: Window, count: int) -> list[str]:
    """Return one kind per column.

    Each column gets the kind that is most underrepresented so far, so that events narrower than a column are also shown
    in proportion to their time.
    """
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
