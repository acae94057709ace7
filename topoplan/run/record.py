"""What is known of a run on the machine that started it: how to find its jobs again, and how they ended.

Each run has a directory below the user's state directory ($XDG_STATE_HOME, else ~/.local/state), which only the user
can read. It holds `run.json` and the copies of the nodes' logs, but no secret: the hosts' environments are not in it.

The log copies may fill the disk, and a record that kept saying `running` would then be false. Space for recording the
end of a run is therefore reserved when the run is created.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from topoplan.errors import InputError, OutputError, nearest
from topoplan.specs.cluster import Host

RunState = Literal["starting", "running", "ended", "failed", "stopped"]
"""The state of a run as far as this machine knows; in `starting` and `running` the hosts know better. `failed`: a node
failed, and the others were stopped. `stopped`: on request."""

SCHEMA = "topoplan.run/1"
LAST = "last"
"""Alias for the run that was started last."""
_FILE = "run.json"
_NEW = ".run-new"
_RESERVE = ".reserve"
_RESERVE_BYTES = 65536
"""Minimum size of the reserve; twice the size of the record if that is larger."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAS_FULL = "the disk of this machine was full when the run ended"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a host recorded when it started a job, and what identifies the job from then on."""

    pid: int
    """Process id of the first process, which waits for the script."""
    session: int
    """Session id of the first process; equal to `pid`."""
    start_ticks: int
    """Start time of the first process, in clock ticks since boot."""
    boot_id: str
    """Id of the machine's boot: process ids and start times mean nothing in another one."""
    unix_s: int
    """Start time in seconds since 1970, by the host's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node of a run, and how to reach it again."""

    node: int
    """Rank among the nodes."""
    name: str
    """Name of the host in messages: the spec's address, with `:port` if given."""
    address: str
    """Address as in the spec; the SSH configuration is evaluated anew each time."""
    user: str | None = None
    """None means what the SSH configuration says."""
    port: int | None = None
    """None means what the SSH configuration says."""
    run_dir: str
    """Its last component begins with the run's id. Relative to the user's home if not absolute."""
    script: str
    """Name of the script, a file in the run directory."""
    code: int | None = None
    """Exit code of the node's job; None if it is unknown or there is none."""
    started: Started | None = None
    """What the host reported at the start, with which the job is found whatever became of the run directory; None if it
    was not started, or nobody recorded it."""

    @property
    def host(self) -> Host:
        """The host to look up in the SSH configuration."""
        return Host(address=self.address, user=self.user, port=self.port)

    @property
    def label(self) -> str:
        """The node's label, such as `node-03`."""
        return f"node-{self.node:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a run measured, beside what was predicted for it."""

    plan: str
    """Id of the run's layout."""
    model: str
    steps: int
    """Number of steps that did nothing but train."""
    step_s: float
    """Mean duration of those steps."""
    spread: float
    """Standard deviation of the step time, as a fraction of the mean."""
    predicted_step_s: float
    band_s: tuple[float, float]
    reserved_bytes: float | None = None
    """Peak of the bytes reserved by PyTorch's allocator, on the GPU that was logged; None if no log has it."""
    predicted_reserved_bytes: float | None = None
    """Predicted bytes for the GPU that was logged."""
    memory_band: float = 0.0
    """Half width of the band around the predicted memory, as a fraction."""

    @property
    def time_held(self) -> bool:
        """Whether the step time was within its band."""
        return self.band_s[0] <= self.step_s <= self.band_s[1]

    @property
    def memory_held(self) -> bool | None:
        """Whether memory was within its band; None if it was not measured."""
        if self.reserved_bytes is None or self.predicted_reserved_bytes is None:
            return None
        return abs(self.reserved_bytes / self.predicted_reserved_bytes - 1.0) <= self.memory_band


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted:
    """Step time or memory that left its predicted range, or returned to it, while the run was watched."""

    seen: str
    """When it was reported: UTC, ISO 8601."""
    what: Literal["step", "memory"]
    state: Literal["out", "back"]
    since_step: int
    step: int
    """Last step that was taken into account."""
    value: float
    """Mean seconds per step since `since_step`, or bytes reserved by PyTorch's allocator."""
    band: tuple[float, float] | None
    """Predicted range; None if nothing was predicted."""
    before: float | None = None
    """The earlier value; None if the current one has held since the first steps."""
    reasons: tuple[str, ...] = ()
    """Possible reasons that the figures give, one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A start of the run that failed and was followed by another start."""

    ended: str
    """When the attempt was over: UTC, ISO 8601."""
    node: str
    """Label of the node that failed first."""
    host: str
    """Address of that node's host."""
    reason: str
    """One line on why it failed."""
    first_step: int | None = None
    """Optimizer step from which the attempt continued; None: from the beginning, or unknown."""
    last_step: int | None = None
    """Last step that was seen; None if none was."""
    run_dirs: tuple[str, ...] = ()
    """Run directories on the hosts, in the order of the nodes: the logs of the attempt are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The record of one run."""

    run_id: str
    name: str
    """Name of the bundle's plan."""
    bundle: str
    """Absolute path of the bundle on this machine, for the user's reference."""
    created: str
    """When the run was created: UTC, ISO 8601."""
    state: RunState = "starting"
    code: int | None = None
    """Exit code of the whole run; None while there is none."""
    ended: str | None = None
    """When this machine saw the run's end: UTC, ISO 8601."""
    reason: str = ""
    """One line on why the run failed or was stopped."""
    left: tuple[str, ...] = ()
    """Labels of nodes that could not be stopped at the end: processes of the run may still be running there."""
    trouble: str = ""
    """One line on what this machine failed to do for the run, such as keeping its logs on a full disk."""
    stop_asked: str | None = None
    """When somebody asked to stop the run, before any process was signaled: UTC, ISO 8601; None if nobody has."""
    stop_grace_s: float = 10.0
    """Grace period of the job after a stop was requested, taking into account all who requested it."""
    ssh_config: str | None = None
    """SSH configuration that was given in place of the user's own."""
    nodes: tuple[NodeRecord, ...] = ()
    """Nodes of the last attempt."""
    attempts: tuple[Attempt, ...] = ()
    """Attempts before the last one."""
    measurement: Measurement | None = None
    """None if the run has not ended, or its logs contain too few steps."""
    drifts: tuple[Drifted, ...] = ()
    """In the order in which they were reported."""

    @property
    def is_over(self) -> bool:
        """Whether the end of the run is known here."""
        return self.state in ("ended", "failed", "stopped")

    @property
    def may_be_running(self) -> bool:
        """Whether something of the run may still be running, as far as this machine knows."""
        return not self.is_over or bool(self.left)

    def directory(self) -> Path:
        """Return directory with the record of the run and the copies of its logs."""
        return runs_directory() / self.run_id

    def log(self, node: NodeRecord) -> Path:
        """Return path of the copy of a node's log in the last attempt; the file exists once something was copied."""
        attempt = f".{len(self.attempts) + 1}" if self.attempts else ""
        return self.directory() / f"{node.label}{attempt}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that cannot be used."""

    run_id: str
    why: str
    """Why it cannot be used, as a phrase."""


def runs_directory() -> Path:
    """Return the directory of all runs; it need not exist."""
    given = os.environ.get("XDG_STATE_HOME", "")
    # The XDG Base Directory Specification declares relative paths invalid, to be ignored.
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    return base / "topoplan" / "runs"


def now_text() -> str:
    """Return the current time in the format of records."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id(name: str) -> str:
    """Return a unique run id made of the name, the UTC time and random digits; it is a valid file name anywhere."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40].strip("-").lower() or "run"
    return f"{slug}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def create(record: RunRecord) -> Path:
    """Create the directory of a new run with its record, and return the directory.

    Raises OutputError: the place cannot be written, or the run already exists.
    """
    if not _RUN_ID.fullmatch(record.run_id):
        raise ValueError(f"{record.run_id!r} is not the id of a run")
    directory = record.directory()
    with _writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(mode=0o700)
        try:
            _write(directory, record)
            _reserve(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
    return directory


def update(run_id: str, *, unless_over: bool = False, **changes: Any) -> RunRecord:
    """Change fields of a record atomically with respect to other processes, and return the new record.

    With `unless_over`, the record of a run whose end is known stays. Raises InputError: the record does not exist or
    cannot be used; OutputError: it cannot be written.
    """
    directory = runs_directory() / run_id
    with _writing(directory), _locked(directory):
        record = _read(run_id)
        if not (unless_over and record.is_over):
            record = _write(directory, dataclasses.replace(record, **changes))
    return record


def load(reference: str = LAST) -> RunRecord:
    """Return the record of the run with the given id, a part of it that no other run has, or `last`.

    Raises InputError: no run matches, several do, or the record cannot be used.
    """
    ids = _ids()
    if not ids:
        raise InputError("there are no runs", where=str(runs_directory()), remedy="start one with `topoplan launch`")
    if reference == LAST:
        records = [record for record in runs() if isinstance(record, RunRecord)]
        if not records:
            raise InputError("no record can be read", where=str(runs_directory()), remedy="see `topoplan runs`")
        return records[-1]
    if reference in ids:
        return _read(reference)
    found = [one for one in ids if reference and one.startswith(reference)]
    found = found or [one for one in ids if reference and reference in one]
    if len(found) == 1:
        return _read(found[0])
    if found:
        named = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        raise InputError(f"{len(found)} runs have {reference!r} in their id: {named}", remedy="give more of the id")
    raise InputError(f"no run {reference!r}", remedy=nearest(reference, ids) or "see `topoplan runs`")


def runs() -> list[RunRecord | Unreadable]:
    """Return all runs, oldest first, followed by those whose record cannot be used."""
    good: list[RunRecord] = []
    bad: list[Unreadable] = []
    for run_id in _ids():
        try:
            good.append(_read(run_id))
        except InputError as error:
            bad.append(Unreadable(run_id=run_id, why=error.what))
    return [*sorted(good, key=lambda record: (record.created, record.run_id)), *bad]


def unfinished() -> list[RunRecord]:
    """Return the runs of which something may still be running, newest first."""
    return [record for record in reversed(runs()) if isinstance(record, RunRecord) and record.may_be_running]


def unfinished_by_address() -> dict[str, str]:
    """Return the id of the newest run of which something may still be running on a host, by the host's address."""
    return {node.address: record.run_id for record in reversed(unfinished()) for node in record.nodes}


def prune(older_than_s: float = 0.0) -> tuple[list[RunRecord], int]:
    """Remove the runs that ended at least `older_than_s` ago, with their log copies; return them and the bytes freed.

    A run of which something may still be running stays: nobody else could stop it. Raises OutputError.
    """
    gone, freed_bytes = [], 0
    until = datetime.now(UTC) - timedelta(seconds=older_than_s)
    for record in runs():
        if not isinstance(record, RunRecord) or record.may_be_running:
            continue
        if datetime.fromisoformat(record.ended or record.created) <= until:
            directory = record.directory()
            with _writing(directory):
                freed_bytes += sum(file.stat().st_size for file in directory.iterdir())
                shutil.rmtree(directory)
            gone.append(record)
    return gone, freed_bytes


def to_dict(record: RunRecord) -> dict[str, Any]:
    """Return the record as JSON data."""
    return {"schema": SCHEMA, **dataclasses.asdict(record)}


def _ids() -> list[str]:
    try:
        names = [entry.name for entry in runs_directory().iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(runs_directory())) from None
    return sorted(name for name in names if _RUN_ID.fullmatch(name))


def _read(run_id: str) -> RunRecord:
    path = runs_directory() / run_id / _FILE
    remedy = "remove its directory if its jobs are not needed any more"
    try:
        text = path.read_bytes()
        schema = json.loads(text)["schema"]
        if schema != SCHEMA:
            raise InputError(
                f"written by another version of topoplan: {schema!r}",
                where=str(path),
                expected=f"expected {SCHEMA!r}",
                remedy="use the version that started the run",
            )
        return _record(run_id, text)
    except FileNotFoundError:
        raise InputError("no record in it", where=str(path.parent), remedy=remedy) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError("damaged: not a record of a run", where=str(path), remedy=remedy) from None


@cache
def _adapter() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)


def _record(run_id: str, text: bytes) -> RunRecord:
    """Parse a record, ignoring unknown keys; raises ValueError if it is not one."""
    record = _adapter().validate_json(text, strict=True)
    if record.run_id != run_id or not math.isfinite(record.stop_grace_s) or record.stop_grace_s < 0:
        raise ValueError
    for moment in filter(None, (record.created, record.ended, record.stop_asked)):
        datetime.fromisoformat(moment)
    return record


def _write(directory: Path, record: RunRecord) -> RunRecord:
    """Replace the record in one step, so that a reader sees either the old one or the new one; return what was written.

    If the disk is full, the end of a run is written into the space reserved for it, and the record says so.
    """
    try:
        handle = os.open(directory / _NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _put(directory / _NEW, handle, _text(record))
        except BaseException:
            (directory / _NEW).unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno not in _FULL or not record.is_over:
            raise
        record = dataclasses.replace(record, trouble="; ".join(filter(None, (record.trouble, _WAS_FULL))))
        try:
            handle = os.open(directory / _RESERVE, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise error from None
        _put(directory / _RESERVE, handle, _text(record))
    if record.is_over:
        (directory / _RESERVE).unlink(missing_ok=True)
    return record


def _put(path: Path, handle: int, data: bytes) -> None:
    """Write to an open file, which then takes the place of the record."""
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    path.replace(path.with_name(_FILE))


def _text(record: RunRecord) -> bytes:
    return (json.dumps(to_dict(record), indent=2) + "\n").encode()


def _reserve(directory: Path) -> None:
    """Reserve the space that the last record may need, with bytes that no file system can compress."""
    size = max(_RESERVE_BYTES, 2 * (directory / _FILE).stat().st_size)
    handle = os.open(directory / _RESERVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(size))
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the record: `launch` and `stop` may both want to change it."""
    if not directory.is_dir():
        raise InputError(f"no run {directory.name!r}", remedy="see `topoplan runs`")
    handle = os.open(directory / ".lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the record of the run cannot be written: {error.strerror or error}",
            where=str(directory),
            remedy="set XDG_STATE_HOME to a directory that can be",
        ) from None
