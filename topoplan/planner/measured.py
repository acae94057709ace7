"""Runs that were measured: the rows of a file such as `catalog/measured/megatron.jsonl`, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from typing import Any

from topoplan.errors import SpecError, nearest

SHIPPED = ("megatron.jsonl", "sharded.jsonl")
"""The files of rows that come with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run measured; None where it did not."""

    allocated_gib: float | None = None
    """Peak of live tensors on the fullest GPU."""
    stage_allocated_gib: tuple[float | None, ...] = ()
    """The same for each pipeline stage."""
    reserved_gib: float | None = None
    """Peak of what torch's allocator held, on the fullest GPU."""
    tokens_per_s_per_gpu: float | None = None
    step_s: float | None = None
    """Seconds of an optimizer step."""
    tflops_per_gpu: float | None = None
    """Model FLOP/s, recomputation left out, in 1e12."""
    oom: bool = False
    """The run ended out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One measured run, or why a row of its source is not graded."""

    id: str
    family: str
    """Short name of the source, which results are grouped by."""
    source: str
    """Where the figures were published."""
    notes: str = ""
    """How they were measured, and what the source leaves open."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The run document: cluster, model, job and layout. Empty for a row that is left out."""
    measured: Measured = Measured()
    unstated: tuple[str, ...] = ()
    """Keys of the layout that memory depends on and that the source does not say."""
    machine: str = ""
    """Profile file beside the rows: kernels that were timed on this very machine, where its source publishes them."""
    slowed: str = ""
    """Why the run is slower than the hardware allows: its speed is graded, but no error band is taken from it."""
    rank_group: str | None = None
    """Runs with the same name here differ in their layout alone, and can be ranked against each other."""
    left_out: str = ""
    """Why the row is not graded."""
    where: str = ""
    """File and line, for messages."""


_KEYS = tuple(f.name for f in fields(MeasuredRun) if f.name != "where")
_FIGURES = tuple(f.name for f in fields(Measured))
_DOCUMENT = ("cluster", "model", "job", "layout")


def shipped_runs() -> list[MeasuredRun]:
    """The rows that come with the package."""
    found: list[MeasuredRun] = []
    for name in SHIPPED:
        text = files("topoplan").joinpath("catalog", "measured", name).read_text(encoding="utf-8")
        found += parse_runs(text, name=f"catalog/measured/{name}")
    return found


def parse_runs(text: str, *, name: str) -> Iterator[MeasuredRun]:
    """The rows of a file's text, one JSON object a line. Raises SpecError with the line of the first that is wrong."""
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SpecError("not JSON", where=where, expected="expected one measured run a line") from error
        run = _run(row, where)
        if run.id in seen:
            raise SpecError(f"id {run.id!r} is also on line {seen[run.id]}", where=where, remedy="give it another")
        seen[run.id] = number
        yield run


def _run(row: Any, where: str) -> MeasuredRun:
    if not isinstance(row, Mapping):
        raise SpecError("not a measured run", where=where, expected="expected a mapping with id, document and measured")
    _refuse_unknown(row, _KEYS, where)
    words = {
        key: _text(row, key, where)
        for key in ("id", "family", "source", "notes", "left_out", "machine", "slowed", "rank_group")
    }
    if not words["id"]:
        raise SpecError("no `id`", where=where)
    values: dict[str, Any] = {key: value for key, value in words.items() if value}
    values.setdefault("source", where.rpartition(":")[0])
    values.setdefault("family", values["source"])
    if values.get("left_out"):
        return MeasuredRun(**values, where=where)
    document = row.get("document")
    if not isinstance(document, Mapping):
        raise SpecError("no `document`", where=where, expected="expected a run document as `topoplan predict` reads it")
    _refuse_unknown(document, (*_DOCUMENT, "id"), f"{where}: document")
    if not isinstance(document.get("layout"), Mapping):
        raise SpecError("no `layout`", where=f"{where}: document", expected="expected a mapping such as {tp: 4, pp: 1}")
    unstated = row.get("unstated", [])
    if not isinstance(unstated, list) or not all(isinstance(key, str) for key in unstated):
        raise SpecError("`unstated` is not a list of names", where=where)
    return MeasuredRun(
        **values, document=document, measured=_measured(row, where), unstated=tuple(unstated), where=where
    )


def _measured(row: Mapping[str, Any], where: str) -> Measured:
    measured = row.get("measured")
    if not isinstance(measured, Mapping):
        raise SpecError("no `measured`", where=where, expected=f"expected one or more of {', '.join(_FIGURES)}")
    _refuse_unknown(measured, _FIGURES, f"{where}: measured")
    values: dict[str, Any] = {}
    for key, value in measured.items():
        place = f"{where}: measured.{key}"
        if key == "oom":
            if not isinstance(value, bool):
                raise SpecError(f"{value!r:.40}", where=place, expected="expected true or false")
            values[key] = value
        elif key == "stage_allocated_gib":
            if not isinstance(value, list):
                raise SpecError(f"{value!r:.40}", where=place, expected="expected a list, one figure a pipeline stage")
            values[key] = tuple(None if figure is None else _positive(figure, place) for figure in value)
        else:
            values[key] = _positive(value, place)
    if not values:
        raise SpecError("nothing is measured", where=where, expected=f"expected one or more of {', '.join(_FIGURES)}")
    return Measured(**values)


def _positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise SpecError(f"{value!r:.40}", where=where, expected="expected a positive number")
    return float(value)


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str):
        raise SpecError(f"{value!r:.40}", where=f"{where}: {key}", expected="expected text")
    return value


def _refuse_unknown(mapping: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in mapping:
        if key not in known:
            raise SpecError(
                f"unknown key {key!r}",
                where=where,
                expected=nearest(str(key), known) or f"expected {', '.join(known)}",
            )
