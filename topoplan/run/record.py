"""What is known of a run on the machine that started it: how to find its jobs again, and what became of them.

Each run has a directory below the user's state directory ($XDG_STATE_HOME, else ~/.local/state), which only the user
can read: `run.json` and the copies of the nodes' logs. It holds no secret: the hosts' environments are not in it.

The copies may fill the disk. A record that then went on to say `running` would lie, so the room for how a run ended is
taken when the run is made.
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
"""As far as this machine knows. `starting` and `running`: the hosts know better. `failed`: a node failed, and the
others were stopped. `stopped`: on request."""

SCHEMA = "topoplan.run/1"
LAST = "last"
"""Stands for the run that was started last."""
_FILE = "run.json"
_NEW = ".run-new"
_RESERVE = ".reserve"
_RESERVE_BYTES = 65536
"""And twice what the record takes, if that is more."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAS_FULL = "the disk of this machine was full when the run ended"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a host recorded when it started a job, and what the job is known by from then on."""

    pid: int
    """Process id of the first process, which waits for the script."""
    session: int
    """Id of its session: the same as `pid`."""
    start_ticks: int
    """When the first process was started, in clock ticks since the machine was."""
    boot_id: str
    """Of the machine's boot: process ids and start times mean nothing in another one."""
    unix_s: int
    """The same moment in seconds since 1970, by the host's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node of a run, and how to reach it again."""

    node: int
    """Rank among the nodes."""
    name: str
    """What messages call its host: the spec's address, with `:port` if given."""
    address: str
    """As the spec has it; the SSH configuration is asked anew each time."""
    user: str | None = None
    """None is what the SSH configuration says."""
    port: int | None = None
    """None is what the SSH configuration says."""
    run_dir: str
    """On the host; its last part begins with the run's id. Relative to the user's home if not absolute."""
    script: str
    """File in the run directory."""
    code: int | None = None
    """Exit code of its job; None: not known, or none."""
    started: Started | None = None
    """What its host said at the start: with it the job is found whatever became of the run directory. None: it was not
    started, or nobody was there to note it."""

    @property
    def host(self) -> Host:
        """What the SSH configuration is asked about."""
        return Host(address=self.address, user=self.user, port=self.port)

    @property
    def label(self) -> str:
        """`node-03`."""
        return f"node-{self.node:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a run measured, beside what was predicted of it."""

    plan: str
    """Id of its layout."""
    model: str
    steps: int
    """Those that did nothing but train."""
    step_s: float
    """Their mean."""
    spread: float
    """Their standard deviation, as a fraction."""
    predicted_step_s: float
    band_s: tuple[float, float]
    reserved_bytes: float | None = None
    """The most that torch's allocator held, of the GPU that was logged; None where no log says it."""
    predicted_reserved_bytes: float | None = None
    """Of the same GPU."""
    memory_band: float = 0.0
    """Half width of the band around it, as a fraction."""

    @property
    def time_held(self) -> bool:
        """The step was in its band."""
        return self.band_s[0] <= self.step_s <= self.band_s[1]

    @property
    def memory_held(self) -> bool | None:
        """Memory was in its band; None where it was not measured."""
        if self.reserved_bytes is None or self.predicted_reserved_bytes is None:
            return None
        return abs(self.reserved_bytes / self.predicted_reserved_bytes - 1.0) <= self.memory_band


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted:
    """Steps or memory that left what was predicted, or were back there, while the run was watched."""

    seen: str
    """When that was told: UTC, ISO 8601."""
    what: Literal["step", "memory"]
    state: Literal["out", "back"]
    since_step: int
    step: int
    """The last one of those that it is about."""
    value: float
    """Seconds a step, the mean since then; or bytes that torch's allocator has held."""
    band: tuple[float, float] | None
    """As predicted; None: nothing was."""
    before: float | None = None
    """The value before; None: it was so from the first steps on."""
    reasons: tuple[str, ...] = ()
    """What the numbers say of why, each as a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A start of the run that failed, and after which it was started again."""

    ended: str
    """When it was over: UTC, ISO 8601."""
    node: str
    """Label of the one that failed first."""
    host: str
    """Its address."""
    reason: str
    """One line on why."""
    first_step: int | None = None
    """Optimizer step from which it went on; None: from the beginning, or not known."""
    last_step: int | None = None
    """The last one that was seen; None: none was."""
    run_dirs: tuple[str, ...] = ()
    """On the hosts, in the order of the nodes: their logs are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run."""

    run_id: str
    name: str
    """Of the bundle's plan."""
    bundle: str
    """Absolute path of the bundle on this machine, for the user's memory."""
    created: str
    """When it was made: UTC, ISO 8601."""
    state: RunState = "starting"
    code: int | None = None
    """Exit code of the whole run; None while it has none."""
    ended: str | None = None
    """When this machine saw its end: UTC, ISO 8601."""
    reason: str = ""
    """One line on why it failed or was stopped."""
    left: tuple[str, ...] = ()
    """Labels of nodes that could not be stopped at its end: something of it may run on there."""
    trouble: str = ""
    """One line on what this machine could not do for it, such as keeping its logs on a disk that is full."""
    stop_asked: str | None = None
    """When somebody asked to stop it, before any process was told: UTC, ISO 8601; None: nobody has."""
    stop_grace_s: float = 10.0
    """Once that is so: the time that the job then has to end by itself, by all who asked."""
    ssh_config: str | None = None
    """SSH configuration that was given in place of the user's own."""
    nodes: tuple[NodeRecord, ...] = ()
    """Of the last attempt."""
    attempts: tuple[Attempt, ...] = ()
    """Those before it."""
    measurement: Measurement | None = None
    """None: it has not ended, or its logs tell of too few steps."""
    drifts: tuple[Drifted, ...] = ()
    """In the order in which they were told."""

    @property
    def is_over(self) -> bool:
        """Whether its end is known here."""
        return self.state in ("ended", "failed", "stopped")

    def directory(self) -> Path:
        """Where its record and the copies of its logs are."""
        return runs_directory() / self.run_id

    def log(self, node: NodeRecord) -> Path:
        """The copy of a node's log in the last attempt; there once something was copied."""
        attempt = f".{len(self.attempts) + 1}" if self.attempts else ""
        return self.directory() / f"{node.label}{attempt}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that cannot be used."""

    run_id: str
    why: str
    """One phrase."""


def runs_directory() -> Path:
    """The directory of all runs; it need not be there."""
    given = os.environ.get("XDG_STATE_HOME", "")
    # As the XDG Base Directory Specification has it, a relative path is invalid and passed over.
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    return base / "topoplan" / "runs"


def now_text() -> str:
    """This moment, as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id(name: str) -> str:
    """An id that no other run has: of the name, the time in UTC and chance. Good as a file name anywhere."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40].strip("-").lower() or "run"
    return f"{slug}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def create(record: RunRecord) -> Path:
    """Make the directory of a new run, with its record; the directory.

    Raises:
        OutputError: the place cannot be written, or there is such a run.
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
    """Change fields of a record, in one step, whoever else does at the same time; the new record.

    With `unless_over` a run whose end is known keeps its record as it is.

    Raises:
        InputError: there is no such record, or it cannot be used.
        OutputError: it cannot be written.
    """
    directory = runs_directory() / run_id
    with _writing(directory), _locked(directory):
        record = _read(run_id)
        if not (unless_over and record.is_over):
            record = _write(directory, dataclasses.replace(record, **changes))
    return record


def load(reference: str = LAST) -> RunRecord:
    """A run by its id, by the beginning of it if no other begins so, or `last`.

    Raises:
        InputError: there is none, there are several, or the record cannot be used.
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
    if len(found) == 1:
        return _read(found[0])
    if found:
        named = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        raise InputError(f"{len(found)} runs begin with {reference!r}: {named}", remedy="give more of the id")
    raise InputError(f"no run {reference!r}", remedy=nearest(reference, ids) or "see `topoplan runs`")


def runs() -> list[RunRecord | Unreadable]:
    """All runs, the oldest first; after those, the ones whose record cannot be used."""
    good: list[RunRecord] = []
    bad: list[Unreadable] = []
    for run_id in _ids():
        try:
            good.append(_read(run_id))
        except InputError as error:
            bad.append(Unreadable(run_id=run_id, why=error.what))
    return [*sorted(good, key=lambda record: (record.created, record.run_id)), *bad]


def prune(older_than_s: float = 0.0) -> tuple[list[RunRecord], int]:
    """Forget the runs whose end is known and so long ago, with the copies of their logs: those, and the bytes. What may
    run on somewhere stays: nobody else could stop it.

    Raises:
        OutputError: one cannot be removed.
    """
    gone, freed_bytes = [], 0
    until = datetime.now(UTC) - timedelta(seconds=older_than_s)
    for record in runs():
        if isinstance(record, RunRecord) and record.is_over and not record.left and _ended(record) <= until:
            directory = record.directory()
            with _writing(directory):
                freed_bytes += sum(file.stat().st_size for file in directory.iterdir())
                shutil.rmtree(directory)
            gone.append(record)
    return gone, freed_bytes


def _ended(record: RunRecord) -> datetime:
    return datetime.fromisoformat(record.ended or record.created)


def to_dict(record: RunRecord) -> dict[str, Any]:
    """As JSON has it."""
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
    """Raises ValueError for what is no record. Keys that we do not know are passed over."""
    record = _adapter().validate_json(text, strict=True)
    if record.run_id != run_id or not math.isfinite(record.stop_grace_s) or record.stop_grace_s < 0:
        raise ValueError
    for moment in filter(None, (record.created, record.ended, record.stop_asked)):
        datetime.fromisoformat(moment)
    return record


def _write(directory: Path, record: RunRecord) -> RunRecord:
    """Into place in one step; a reader sees the old record or the new one. Where the disk is full, the end of a run
    takes the room that was kept for it, and says so: the record as it was written."""
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
    """Take the room that the last record may need, with bytes that no file system stores in less."""
    size = max(_RESERVE_BYTES, 2 * (directory / _FILE).stat().st_size)
    handle = os.open(directory / _RESERVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(size))
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time changes the record: `launch` and `stop` may both."""
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
