"""What a run measured, beside what was predicted of it: from the copies of its logs, when it has ended.

The file that its trainer writes in the output directory is fetched where it says more than what was printed, and kept
beside the copies. So the same can be worked out again later, from the record alone.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from pathlib import Path

from topoplan.bundle.plan_file import RecordedPlan, read_plan_file
from topoplan.errors import HostError, InputError, TopoplanError
from topoplan.planner.exhausted import Ended, read_exhausted
from topoplan.planner.fragmentation import predicted_bytes
from topoplan.planner.learn import Lesson, peaks_of
from topoplan.planner.logged import read_log
from topoplan.planner.plan import Plan
from topoplan.remote.connection import Connection
from topoplan.run.record import Measurement, RunRecord
from topoplan.specs.source import read_source
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import trainer_named
from topoplan.trainers.trainer import MAIN_FILE
from topoplan.units import GIB

_MOST_BYTES = 4 << 20
"""Of a trainer's file the end: ten thousand steps and more."""
_MOST_LOG_BYTES = 64 << 20
"""Of the copy of a node's log."""


def measurement(record: RunRecord, spec: Spec, plan: Plan) -> Measurement | None:
    """What the logs of a run say; None where they tell of too few steps."""
    lesson = lesson_of(record, spec, plan)
    if lesson is None:
        return None
    logged, (low, high), memory = lesson.logged, plan.time.band_s, plan.memory
    reserved = predicted_bytes(peaks_of(lesson))[1] if logged.reserved_bytes else None
    return Measurement(
        plan=plan.id,
        model=spec.model.name.rstrip("/").rpartition("/")[2],
        steps=logged.steps,
        step_s=logged.step_s,
        spread=logged.spread,
        predicted_step_s=plan.time.step_s,
        band_s=(low, high),
        reserved_bytes=logged.reserved_bytes,
        predicted_reserved_bytes=reserved,
        memory_band=memory.band,
    )


def lesson_of(record: RunRecord, spec: Spec, plan: Plan) -> Lesson | None:
    """The log of a run that tells most, with its plan; None where none tells of enough steps."""
    found = []
    for text in _texts(record, plan):
        with contextlib.suppress(InputError):
            found.append(read_log(text, name=f"run {record.run_id}", trainer=plan.trainer))
    if not found:
        return None
    best = max(found, key=lambda one: (bool(one.reserved_bytes), one.steps))
    return Lesson(spec=spec, plan=plan, logged=best)


def ended_of(record: RunRecord, spec: Spec, plan: Plan) -> Ended | None:
    """How a run ended out of memory, by the first node whose log says so; None where none does."""
    found = next(filter(None, map(read_exhausted, _texts(record, plan))), None)
    return Ended(spec=spec, plan=plan, found=found, name=f"run {record.run_id}") if found else None


def planned(record: RunRecord) -> RecordedPlan:
    """The plan of a run. Raises InputError where its bundle is gone, or that of another run by now."""
    found = read_plan_file(record.bundle)
    if found.source.data.get("run") != record.name:
        raise InputError("is the bundle of another run now", where=record.bundle)
    return found


def fetch(record: RunRecord, spec: Spec, plan: Plan, connection: Connection | None, deadline_s: float) -> None:
    """Keep the end of the trainer's file on the first node beside the logs, where it writes one; nothing is raised."""
    if connection is not None and (text := trainer_file(record, spec, plan, connection, deadline_s)):
        with contextlib.suppress(OSError):
            (record.directory() / _file_of(plan)).write_bytes(text)


def trainer_file(
    record: RunRecord,
    spec: Spec,
    plan: Plan,
    connection: Connection,
    deadline_s: float,
    *,
    most_bytes: int = _MOST_BYTES,
) -> bytes:
    """The end of the file that the trainer writes on this host, nothing where there is none; nothing is raised."""
    name = _file_of(plan)
    try:
        output = str(read_source(Path(record.bundle) / MAIN_FILE).data["output_dir"]) if name else ""
        workdir = spec.cluster.hosts[0].workdir if spec.cluster.hosts else None
        words = ("tail", "-c", str(most_bytes), "--", posixpath.join(workdir or record.nodes[0].run_dir, output, name))
        done = connection.run(words, deadline_s=deadline_s, keep_bytes=2 * most_bytes) if name else None
    except (HostError, TopoplanError, OSError, KeyError):
        return b""
    return done.stdout if done is not None and done.code == 0 else b""


def _file_of(plan: Plan) -> str:
    return trainer_named(plan.trainer).log.file if plan.trainer else ""


def _texts(record: RunRecord, plan: Plan) -> Iterator[str]:
    """The ends of the copies that are there."""
    name = _file_of(plan)
    for path in [*([record.directory() / name] if name else []), *(record.log(node) for node in record.nodes)]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST_LOG_BYTES))
            yield file.read().decode("utf-8", "replace")


def measured_words(found: Measurement) -> str:
    """`a step took 1.05 s (38 steps), 12% more than predicted, outside of the band of 0.84 to 1.03 s; ...`."""
    low, high = found.band_s
    words = (
        f"a step took {found.step_s:.3g} s ({found.steps} steps), {_more(found.step_s, found.predicted_step_s)},"
        f" {'within' if found.time_held else 'outside of'} the band of {low:.3g} to {high:.3g} s"
    )
    if found.reserved_bytes is None or found.predicted_reserved_bytes is None:
        return words
    held = "within" if found.memory_held else "outside of"
    return (
        f"{words}; torch held {found.reserved_bytes / GIB:.1f} GiB,"
        f" {_more(found.reserved_bytes, found.predicted_reserved_bytes)}, {held} the band"
    )


def _more(real: float, predicted: float) -> str:
    more = round(100.0 * (real / predicted - 1.0))
    return f"{abs(more)}% {'more' if more > 0 else 'less'} than predicted" if more else "as predicted"
