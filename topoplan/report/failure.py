"""The first failure of a run, with its log tail, the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topoplan.errors import HostError
from topoplan.run.failure import Failure

_TAIL_LINES = 20


def failure_lines(failure: Failure) -> Iterator[str]:
    """Format a failure as text lines."""
    diagnosis = failure.diagnosis
    rank = f", rank {diagnosis.rank}" if diagnosis is not None and diagnosis.rank is not None else ""
    yield f"topoplan: {failure.node} ({failure.host}){rank} failed first: {failure.what}"
    if failure.tail:
        yield "  its last lines:"
        yield from (f"    {line}" for line in failure.tail[-_TAIL_LINES:])
    if failure.stacks:
        yield "  where the ranks were:"
        yield from (f"    {line}" for line in failure.stacks)
    if diagnosis is not None:
        sure = "" if diagnosis.certain else ", though it may be the consequence of something else"
        yield f"  likely cause: {diagnosis.cause}{sure}"
        if diagnosis.remedy:
            yield f"  what to do: {diagnosis.remedy}"
    if failure.log is not None:
        yield f"  whole logs: {failure.log.parent}"


def failure_to_dict(failure: Failure) -> dict[str, Any]:
    """Return a failure as JSON."""
    diagnosis = failure.diagnosis
    return {
        "node": failure.node,
        "host": failure.host,
        "what": failure.what,
        "code": failure.code,
        "rank": diagnosis.rank if diagnosis else None,
        "kind": diagnosis.kind if diagnosis else None,
        "cause": diagnosis.cause if diagnosis else None,
        "remedy": diagnosis.remedy if diagnosis else None,
        "evidence": list(diagnosis.evidence) if diagnosis else [],
        "lines": list(failure.tail[-_TAIL_LINES:]),
        "stacks": list(failure.stacks),
    }


def error_to_dict(error: HostError) -> dict[str, Any]:
    """Return the error of a host as JSON."""
    return {"host": error.host, "problem": error.problem, "what": error.what, "remedy": error.remedy}
