"""Write a timeline in Chrome's trace format, for chrome://tracing and Perfetto.

Source: "Trace Event Format" (Google, 2016): complete events (`ph` X) with `ts` and `dur` in microseconds, names of
processes and threads as metadata events (`ph` M).
"""

from __future__ import annotations

import json
from typing import Any

from topoplan.engines.timeline import Timeline
from topoplan.planner.plan import Plan

MARK = '{"otherData": {"writer": "topoplan timeline"'
"""The start of every trace written by topoplan."""


def trace(title: str, plan: Plan, drawn: Timeline) -> str:
    """Return the trace file: one process, a thread per pipeline rank or lane, one event per line."""
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
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": f"step of {plan.id}"}}
    ]
    for rank in range(drawn.ranks):
        name = {"name": drawn.lanes[rank] if drawn.lanes else f"pipeline rank {rank}"}
        found.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": name})
        found.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}})
    for event in drawn.events:
        details = {"micro batch": event.microbatch}
        if not drawn.lanes:
            details |= {"chunk": event.chunk, "virtual stage": event.chunk * drawn.ranks + event.rank}
        found.append(_complete(event.kind, event.rank, event.start_s, event.end_s) | {"args": details})
    for phase in drawn.phases:
        found += [_complete(phase.name, rank, phase.start_s, phase.end_s) for rank in range(drawn.ranks)]
    for number, communication in enumerate(drawn.communications, start=drawn.ranks):
        name = {"name": f"{communication.name}, rank {communication.rank}"}
        found.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": name})
        found.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
        found += [_complete(span.name, number, span.start_s, span.end_s) for span in communication.spans]
    return found


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
