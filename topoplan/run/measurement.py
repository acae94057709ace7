"""What a run measured, beside what was predicted for it, from the copies of its logs after it has ended.

If the trainer writes a log file to its output directory that says more than its output, the file is fetched and kept
beside the log copies. The measurement can then be computed again later from the record alone.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from topoplan.bundle.plan_file import RecordedPlan, read_plan_file
from topoplan.errors import HostError, InputError, TopoplanError
from topoplan.planner.exhausted import Ended, read_exhausted
from topoplan.planner.fragmentation import predicted_bytes
from topoplan.planner.learn import Lesson, peaks_of
from topoplan.planner.logged import TooFewStepsError, open_end, read_log
from topoplan.planner.plan import Plan
from topoplan.remote.connection import Connection
from topoplan.run.record import Measurement, RunRecord
from topoplan.specs.source import read_source
from topoplan.specs.spec import Spec
from topoplan.trainers.log import KEYWORDS
from topoplan.trainers.registry import trainer_named
from topoplan.trainers.trainer import MAIN_FILE
from topoplan.units import GIB

_PIECE_BYTES, _LINE_BYTES = 4096, 65536
_TELLING = tuple(
    word.encode() for word in (*KEYWORDS, "tep", "iteration", "emory", "alloc", "reserved", "batch", ' File "')
)
"""At least one of these is in every line about a step or exhausted memory, and in those of a traceback."""
_MOST_BYTES = 4 << 20
"""Limit for the end of a trainer's log file and for the relevant part of a log: ten thousand steps and more."""


def measurement(record: RunRecord, spec: Spec, plan: Plan) -> Measurement | None:
    """Return the measurement from the logs of a run; None if they cover too few steps."""
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
        memory_band=memory.reserved_band,
    )


def lesson_of(record: RunRecord, spec: Spec, plan: Plan) -> Lesson | None:
    """Return the most informative log of a run, with its plan; None if no log covers enough steps."""
    return lesson_in(_texts(record, plan), f"run {record.run_id}", spec, plan)


def lesson_in(texts: Iterable[str], name: str, spec: Spec, plan: Plan) -> Lesson | None:
    """Return the most informative of several logs of one run; `name` is for messages."""
    found = []
    for text in texts:
        with contextlib.suppress(InputError):
            found.append(read_log(text, name=name, trainer=plan.trainer))
    if not found:
        return None
    best = max(found, key=lambda one: (bool(one.reserved_bytes), one.steps))
    return Lesson(spec=spec, plan=plan, logged=best)


def why_unmeasured(record: RunRecord) -> str:
    """Return why a run has no measurement, as a phrase."""
    if not record.is_over:
        return "its end has not been seen here"
    try:
        found = planned(record)
    except TopoplanError as error:
        return str(error)
    return why_no_lesson(record, found.plan)


def why_no_lesson(record: RunRecord, plan: Plan) -> str:
    """Return why no log of a run covers enough steps, by the log that says most, as a phrase."""
    errors: list[InputError] = []
    for text in _texts(record, plan):
        try:
            read_log(text, name=f"run {record.run_id}", trainer=plan.trainer)
        except InputError as error:
            errors.append(error)
        else:
            return "nobody watched it to its end; its log tells enough"
    if not errors:
        return "there is no copy of its log here"
    # Most nodes print no steps at all. What helps a log that is being written is too late for a run that is over.
    most = next((error for error in errors if isinstance(error, TooFewStepsError)), errors[0])
    return f"its log {'; '.join(filter(None, (most.what, most.expected)))}"


def ended_of(record: RunRecord, spec: Spec, plan: Plan) -> Ended | None:
    """Return how a run ran out of memory, from the first node whose log says so; None if no log does."""
    return ended_in(_texts(record, plan), f"run {record.run_id}", spec, plan)


def ended_in(texts: Iterable[str], name: str, spec: Spec, plan: Plan) -> Ended | None:
    """Return how a run ran out of memory, from several logs of it, the first node's first; None if no log says so."""
    found = next(filter(None, map(read_exhausted, texts)), None)
    return Ended(spec=spec, plan=plan, found=found, name=name) if found else None


def planned(record: RunRecord) -> RecordedPlan:
    """Return the plan of a run. Raises InputError if its bundle is gone, or belongs to another run by now."""
    found = read_plan_file(record.bundle)
    if found.source.data.get("run") != record.name:
        raise InputError("is now the bundle of another run", where=record.bundle)
    return found


def fetch(record: RunRecord, spec: Spec, plan: Plan, connection: Connection | None, deadline_s: float) -> None:
    """Keep the end of the trainer's log file on the first node beside the log copies, if there is one; never raises."""
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
    """Return the end of the trainer's log file on this host; empty if there is none; never raises."""
    try:
        path = path_of_file(Path(record.bundle), record.nodes[0].run_dir, spec, plan)
        words = ("tail", "-c", str(most_bytes), "--", path)
        done = connection.run(words, deadline_s=deadline_s, keep_bytes=2 * most_bytes) if path else None
    except (HostError, TopoplanError, OSError, KeyError):
        return b""
    return done.stdout if done is not None and done.code == 0 else b""


def path_of_file(bundle: Path, run_dir: str, spec: Spec, plan: Plan) -> str:
    """Return the path of the trainer's log file on the first node, empty if it has none. Raises KeyError,
    InputError."""
    if not (name := _file_of(plan)):
        return ""
    workdir = spec.cluster.hosts[0].workdir if spec.cluster.hosts else None
    return posixpath.join(workdir or run_dir, str(read_source(bundle / MAIN_FILE).data["output_dir"]), name)


def _file_of(plan: Plan) -> str:
    return trainer_named(plan.trainer).log.file if plan.trainer else ""


def _texts(record: RunRecord, plan: Plan) -> Iterator[str]:
    name = _file_of(plan)
    yield from ends_of([*([record.directory() / name] if name else []), *map(record.log, record.nodes)])


def ends_of(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the relevant lines at the ends of the logs that exist."""
    for path in paths:
        with contextlib.suppress(OSError), open_end(path) as file:
            told, size = deque[bytes](), 0
            for piece in _telling(file):
                told.append(piece)
                size += len(piece)
                while size > _MOST_BYTES:
                    size -= len(told.popleft())
            yield b"".join(told).decode("utf-8", "replace")


def _telling(file: BinaryIO) -> Iterator[bytes]:
    """Yield a log in pieces; pieces without relevant words are reduced to their line ends."""
    while piece := file.read(_PIECE_BYTES) + file.readline(_LINE_BYTES):
        yield piece if any(word in piece for word in _TELLING) else b"\n" * piece.count(b"\n")


def measured_words(found: Measurement) -> str:
    """Describe a measurement: `a step took 1.05 s (38 steps), 12% more than predicted, within the band of ...`."""
    low, high = found.band_s
    words = (
        f"a step took {found.step_s:.3g} s ({found.steps} steps), {_more(found.step_s, found.predicted_step_s)},"
        f" {'within' if found.time_held else 'outside of'} the band of {low:.3g} to {high:.3g} s"
    )
    if found.reserved_bytes is None or found.predicted_reserved_bytes is None:
        return words
    held = "within" if found.memory_held else "outside of"
    return (
        f"{words}; torch reserved {found.reserved_bytes / GIB:.1f} GiB,"
        f" {_more(found.reserved_bytes, found.predicted_reserved_bytes)}, {held} the band"
    )


def _more(real: float, predicted: float) -> str:
    more = round(100.0 * (real / predicted - 1.0))
    return f"{abs(more)}% {'more' if more > 0 else 'less'} than predicted" if more else "as predicted"
