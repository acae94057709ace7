"""Run logs among the checked files: where a run went out of memory, what that says about its plan, or who reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from topoplan.bundle.plan_file import read_plan_file
from topoplan.errors import InputError, SpecError
from topoplan.lint.prediction import RULES, Prediction
from topoplan.planner.exhausted import Exhausted, exhausted_words, happened, read_exhausted
from topoplan.planner.logged import last_step, log_text
from topoplan.planner.plan import Plan
from topoplan.reading.finding import Finding
from topoplan.reading.parts import Part
from topoplan.reading.setup import Setup
from topoplan.specs.dataset import columns_of_record
from topoplan.specs.json_source import json_value
from topoplan.specs.source import shown_path
from topoplan.specs.spec import Spec

_SUFFIXES = (".log", ".out", ".err", ".jsonl")


def is_log(path: str) -> bool:
    """Whether a file is a run's log, judging by its name."""
    return Path(path).suffix.lower() in _SUFFIXES and not Path(path).is_dir()


def read_logs(paths: Sequence[str]) -> tuple[tuple[Part, ...], tuple[tuple[Part, SpecError], ...]]:
    """Read logs as parts. Returns the parts, and those that could not be read or are no logs with their errors."""
    found: list[Part] = []
    unread: list[tuple[Part, SpecError]] = []
    for path in paths:
        part = Part(kind="log", name=shown_path(Path(path)), text="")
        try:
            part = replace(part, text=log_text(Path(path)))
            _refuse_records(part)
            found.append(part)
        except SpecError as error:
            unread.append((part, error))
    return tuple(found), tuple(unread)


def _refuse_records(part: Part) -> None:
    """Raise SpecError for a file of JSON records that are no lines of a trainer's log."""
    # Of a long file, only the end was read, and its first line may be cut.
    text = part.text.strip()
    first, last = text.partition("\n")[0], text.rpartition("\n")[2]
    record = _record(last)
    if record is None or last_step(last) is not None:
        return
    try:
        columns_of_record(record, part.name)
    except SpecError:
        if _record(first) is None or last_step(text) is not None or read_exhausted(text) is not None:
            return
        what, remedy = "holds records, and no step of a run", "give the log of a trainer, such as trainer_log.jsonl"
        raise SpecError(what, where=part.name, remedy=remedy) from None
    remedy = f"`topoplan rank SPEC --set dataset={quote(part.name)}` measures the lengths of its samples"
    raise SpecError("is a data set, in which nothing is checked", where=part.name, remedy=remedy)


def _record(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if there is none."""
    try:
        record = json_value(line, name="")
    except SpecError:
        return None
    return record if isinstance(record, dict) else None


def of_logs(setup: Setup, predictions: Sequence[Prediction]) -> Iterator[Finding]:
    """Yield a finding for each log that ended out of memory, with what was predicted for the plan that ran, and a note
    on each other log of a trainer."""
    ran = list(_ran(setup, predictions))
    for part in setup.logs:
        if (found := read_exhausted(part.text)) is not None:
            yield _finding(part, found, ran)
        elif (step := last_step(part.text)) is not None:
            yield RULES["log-of-a-run"].found(part, None, step=f"{step:,}", log=quote(part.name))


def _ran(setup: Setup, predictions: Sequence[Prediction]) -> Iterator[tuple[Spec, Plan]]:
    """Yield the plans that may have run: those of bundles, and those predicted for configurations."""
    for bundle in setup.bundles:
        try:
            recorded = read_plan_file(str(bundle))
        except InputError:
            continue  # reported by a separate finding
        yield recorded.spec, recorded.plan
    for one in predictions:
        if one.translation and one.plan and setup.bundle_of(one.configuration) is None:
            yield one.translation.spec, one.plan


def _finding(part: Part, found: Exhausted, ran: Sequence[tuple[Spec, Plan]]) -> Finding:
    what, why = happened(found), ""
    if len(ran) == 1:
        what, *more, remedy = exhausted_words(*ran[0], found)
        why = "; ".join(more)
    elif ran:
        remedy = f"check it only with the plan that it is the log of: {len(ran)} plans are given"
    else:
        remedy = "also pass what ran, a bundle or its configuration with --cluster, to compare it with the prediction"
    return RULES["log-out-of-memory"].found(part, found.line, what=what, why=why, remedy=remedy)
