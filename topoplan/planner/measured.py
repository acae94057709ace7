"""Measured runs: the rows of a file such as `catalog/measured/megatron.jsonl`, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from typing import Annotated, Any

from topoplan.errors import SpecError, listed, nearest
from topoplan.specs.blocks import Block
from topoplan.specs.kinds import Number, Switch

SHIPPED = ("megatron.jsonl", "sharded.jsonl")
"""Files of rows that come with the package."""
Figure = Annotated[float | None, Number()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Block):
    """What a run measured; None for figures that it did not measure."""

    allocated_gib: Figure = None
    """Peak of live tensors on the fullest GPU."""
    stage_allocated_gib: tuple[Figure, ...] = ()
    """Peak of live tensors on each pipeline stage."""
    reserved_gib: Figure = None
    """Peak of what torch's allocator held, on the fullest GPU."""
    device_gib: Figure = None
    """What nvidia-smi showed, on the fullest GPU."""
    tokens_per_s_per_gpu: Figure = None
    step_s: Figure = None
    """Seconds of an optimizer step."""
    tflops_per_gpu: Figure = None
    """Model FLOP/s, without recomputation, in 1e12."""
    oom: Annotated[bool, Switch()] = False
    """Whether the run ended out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun(Block):
    """One measured run, or why a row of its source is not graded."""

    id: str
    family: str = ""
    """Short name of the source, by which results are grouped; defaults to the source."""
    source: str = ""
    """Where the figures were published; defaults to the file of the row."""
    notes: str = ""
    """How the figures were measured, and what the source leaves open."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The run document: cluster, model, job and layout. Empty for a row that is left out."""
    measured: Measured = Measured()
    unstated: tuple[str, ...] = ()
    """Keys of the layout that memory depends on and that the source does not state."""
    machine: str = ""
    """Profile file beside the rows, with kernels timed on the run's own machine, if the source publishes them."""
    slowed: str = ""
    """Why the run is slower than the hardware allows; its speed is graded, but no error band is derived from it."""
    rank_group: str | None = None
    """Runs with equal names here differ in their layout only, and can be ranked against each other."""
    left_out: str = ""
    """Why the row is not graded."""
    where: str = ""
    """File and line, for messages."""


_DOCUMENT = ("id", "cluster", "model", "job", "layout")


def shipped_runs() -> list[MeasuredRun]:
    """Return the rows that come with the package."""
    found: list[MeasuredRun] = []
    for name in SHIPPED:
        text = files("topoplan").joinpath("catalog", "measured", name).read_text(encoding="utf-8")
        found += parse_runs(text, name=f"catalog/measured/{name}")
    return found


def parse_runs(text: str, *, name: str) -> Iterator[MeasuredRun]:
    """Yield the rows of a file's text, one JSON object per line. Raises SpecError with the first wrong line."""
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
    from topoplan.specs.mistakes import check_form

    if not isinstance(row, Mapping):
        raise SpecError("not a measured run", where=where, expected="expected a mapping with id, document and measured")
    if bare := [f"`{key}`" for key in _DOCUMENT if key in row and key != "id"]:
        # Most likely a run document: said of its keys one by one, that they are unknown helps nobody.
        what = f"{listed(bare)} {'belong' if len(bare) > 1 else 'belongs'} under `document`"
        remedy = 'and what was measured under `measured`, as in `"measured": {"step_s": 1.5}`'
        raise SpecError(what, where=where, remedy=remedy)
    run = check_form(MeasuredRun, row, lambda path: where)
    source = run.source or where.rpartition(":")[0]
    run = replace(run, where=where, source=source, family=run.family or source)
    if run.left_out:
        return run
    if not run.document:
        raise SpecError("no `document`", where=where, expected="expected a run document as `topoplan predict` reads it")
    if unknown := next((key for key in run.document if key not in _DOCUMENT), None):
        expected = nearest(unknown, _DOCUMENT) or f"expected {', '.join(_DOCUMENT)}"
        raise SpecError(f"unknown key {unknown!r}", where=f"{where}: document", expected=expected)
    if not isinstance(run.document.get("layout"), Mapping):
        raise SpecError("no `layout`", where=f"{where}: document", expected="expected a mapping such as {tp: 4, pp: 1}")
    if run.measured == Measured():
        figures = ", ".join(own.name for own in fields(Measured))
        raise SpecError("nothing is measured", where=where, expected=f"expected one or more of {figures}")
    return run
