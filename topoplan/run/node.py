"""The job of one node: start it on its host, follow its log, query its state, stop it.

A job does not depend on the connection that started it; `topoplan.run.programs` explains how a job is identified. All
that a run leaves on a host is in its run directory, whose last component is the run's name there. A caller that has
what `start_node` returned passes it as `started`, so that the job is found even without that directory.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Literal, NoReturn, cast, get_args

from pydantic import TypeAdapter

from topoplan.errors import HostError
from topoplan.remote.connection import Completed, Connection, Stream
from topoplan.remote.upload import File, sums
from topoplan.run import programs
from topoplan.run.programs import ExitCode
from topoplan.run.record import Started
from topoplan.run.secrets import Mask
from topoplan.run.shown import shown_line

State = Literal["running", "ended", "gone", "never-started", "rebooted"]
Directory = Literal["there", "gone", "closed", "foreign", "damaged"]
"""The condition of a run directory. `gone`: it does not exist, or is not where we may look. `closed`: it cannot be
entered. `foreign`: others have access to it, so it is not trusted. `damaged`: its record of the start is not ours."""

READ_ONLY = "a file system has become read-only"
SETTLE_S = 5.0
"""Longest wait for processes to disappear after SIGKILL."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of a node's job."""

    state: State
    """`gone`: without an exit code, as the first process was killed too. `rebooted`: the machine was, meanwhile."""
    code: int | None = None
    """Exit code of the script, 128 + N if signal N ended it; None unless `ended`."""
    log_bytes: int = 0
    pids: tuple[int, ...] = ()
    """Process ids of the job in whatever session; after its end, of the processes that it left running."""
    started: Started | None = None
    """None if the job was never started."""
    elapsed_s: int | None = None
    """Seconds from the start to the end or until now; None if unknown."""
    ended_s_ago: float | None = None
    """Seconds since the end; None unless `ended`."""
    directory: Directory = "there"
    stopped: str = ""
    """If the host ended this job because another node failed: which node, and how, such as `node-02 failed`."""

    @property
    def is_unreadable(self) -> bool:
        """Whether the run directory gives neither the exit code nor the log."""
        return self.directory in ("gone", "closed", "foreign")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectProcess:
    """A process that may belong to a job, without proof."""

    pid: int
    holds: Literal["file", "GPU"]
    """What the process holds: a file in the run directory, or where that directory was; or a GPU."""
    since_unix_s: int
    """When the process was started, by the host's clock."""
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The result of stopping a job."""

    was_running: bool
    left: tuple[int, ...]
    code: int | None
    """Exit code of the script; None if it left none."""
    suspects: tuple[SuspectProcess, ...] = ()
    """Processes that got no signal, because nothing proves any more that they belong to the job."""
    directory: Directory = "there"
    gpus_unseen: bool = False
    """Whether the host could not tell which processes hold its GPUs."""

    @property
    def is_over(self) -> bool:
        """Whether no process is left, as far as can be seen."""
        return not self.left and not self.suspects


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Where the supervisors of a run's nodes meet, and their time limits; see `scripts/supervise.py`."""

    nodes: int
    address: str
    """Address of node 0, to which the other nodes connect."""
    port: int
    """The master port, until the trainer takes it."""
    token: str
    meet_s: float = 15.0
    """Longest wait for all supervisors to meet; jobs are then started without full supervision."""
    end_after_s: float = 20.0
    """Time from a node's failure until the other hosts end their own jobs; a client that is connected acts sooner."""
    lost_s: float = 900.0
    """Time without a sign of life after which a machine counts as gone."""
    grace_s: float = 10.0

    def lines(self, node: int, run_dir: str) -> str:
        """Return the two lines of standard input for a node's supervisor: its program and its configuration."""
        words = (_run_name(run_dir), *_times(self.grace_s))
        told = {**asdict(self), "node": node, "stop": programs.STOP, "stop_words": words}
        return f"{json.dumps(programs.SUPERVISE)}\n{json.dumps(told)}\n"


NO_PEERS = "\n\n"
"""Used in place of the lines of `Peers` for a node that has no peers."""


def start_node(
    connection: Connection,
    *,
    run_dir: str,
    script: str,
    environment: Mapping[str, str],
    deadline_s: float,
    files: Mapping[str, File | bytes] | None = None,
    supervision: str = NO_PEERS,
    python: str = "",
) -> Started:
    """Start `script`, a file in `run_dir`, with bash; it runs there without a terminal, detached from this process.

    `environment` is exported before the script runs; it goes to the host over standard input, and into no file there.
    Nothing is started unless each of `files`, which were uploaded, still has that content in a directory that nobody
    else can change. `supervision` is the result of `Peers.lines`; `python` is for a host without python3.

    Raises ValueError for a name in `environment` that is none. Raises HostError: `command`: nothing was started; `lost`
    or `deadline`: the job may have been, which `node_state` tells.
    """
    for name in environment:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a variable")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    words = (_path_argument(run_dir), script, _run_name(run_dir), programs.LEADER, sums(files or {}), python)
    stdin = f"{supervision}{exports}{programs.WHOLE}\n".encode(errors="surrogateescape")
    done = connection.run(programs.START, *words, stdin=stdin, deadline_s=deadline_s)
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    if done.code != 0 or not lines:
        # Mask before the text is cut: half of a secret would not be recognized.
        stderr = Mask(environment.values()).text(done.stderr.decode(errors="replace"))
        _refuse(connection, replace(done, stderr=stderr.encode()), run_dir, script)
    return _started(lines[-1].decode(), connection, run_dir)


def follow_node(connection: Connection, run_dir: str, *, offset: int = 0) -> Stream:
    """Stream the bytes of the job's log from `offset`, at most its size, and what is added to it.

    The stream ends when the job has ended, with the job's exit code if there is one; `node_state` distinguishes it from
    an exit code of the follower, which ends when the stream is closed or this process ends. The job does not. Raises
    HostError: `lost`, `deadline` or `command`: the host starts no command.
    """
    return connection.start(programs.FOLLOW, _path_argument(run_dir), f"-c+{offset + 1}", hold_stdin=True)


def read_log(connection: Connection, run_dir: str, *, tail_lines: int | None = None) -> Stream:
    """Stream the log as it is now: its last lines, or all of it. A nonzero exit code means that there is no log.

    Raises HostError, as `follow_node`.
    """
    start = "-c+1" if tail_lines is None else f"-n{tail_lines}"
    return connection.start(["tail", start, "--", posixpath.join(_path_argument(run_dir), ".topoplan", "log")])


def node_state(connection: Connection, run_dir: str, *, started: Started | None = None, deadline_s: float) -> NodeState:
    """Return the state of the job in `run_dir`. Raises HostError: `lost`, `deadline`, or `command`: it cannot tell."""
    done = connection.run(programs.STATE, *job_words(run_dir, started), deadline_s=deadline_s)
    values = key_values(done)
    state = values.get("state")
    if done.code != 0 or state not in get_args(State):
        _refuse(connection, done, run_dir)
    if started is None and "started" in values:
        started = _started(values["started"], connection, run_dir)
    code = _number(values.get("code")) if state == "ended" else None
    return NodeState(
        state=cast(State, state),
        code=code,
        log_bytes=_number(values.get("log_bytes")) or 0,
        pids=_pids(values.get("pids")),
        started=started,
        elapsed_s=_number(values.get("elapsed_s")),
        ended_s_ago=_seconds(values.get("ended_s_ago")),
        directory=_directory(values),
        stopped=shown_line(values.get("stopped", "").encode()) if state == "ended" else "",
    )


def tail_offsets(
    connection: Connection, run_dir: str, lines: Sequence[int], *, log_bytes: int, deadline_s: float
) -> list[int]:
    """For each number in `lines`, the offset at which that many last lines begin in the first `log_bytes` of the log.

    Raises HostError, as `node_state`.
    """
    if not log_bytes:
        return [0 for _ in lines]
    words = (posixpath.join(_path_argument(run_dir), ".topoplan", "log"), str(log_bytes), *map(str, lines))
    done = connection.run(programs.TAIL_BYTES, *words, deadline_s=deadline_s)
    sizes = [int(word) for word in key_values(done).get("tail_bytes", "").split() if word.isdecimal()]
    if done.code != 0 or len(sizes) != len(lines):
        _refuse(connection, done, run_dir)
    return [log_bytes - size for size in sizes]


def full_disks(connection: Connection, run_dir: str, *, deadline_s: float) -> list[str]:
    """Describe the file systems of the run on which nothing more can be written, one phrase each.

    Raises HostError, as `node_state`.
    """
    done = connection.run(programs.FULL_DISKS, _path_argument(run_dir), deadline_s=deadline_s)
    found = re.findall(
        r"^topoplan:full=(space|files|writes) ([0-9]+) (\S.*)$", done.stdout.decode(errors="replace"), re.M
    )
    sizes = {"space": lambda kib: f", {kib / 2**20:.3g} GiB" if kib >= 2**20 else f", {kib / 2**10:.3g} MiB"}
    sizes |= {"files": lambda count: f", with all its {count:,} inodes", "writes": lambda _: ""}
    what = {"space": "the disk is full", "files": "the disk is full", "writes": READ_ONLY}
    return [f"{what[lacks]}: {shown_line(mount.encode())}{sizes[lacks](int(size))}" for lacks, size, mount in found]


def stop_node(
    connection: Connection, run_dir: str, *, started: Started | None = None, grace_s: float, deadline_s: float
) -> Stopped:
    """End all processes of the job: SIGTERM, `grace_s` later SIGKILL, then check whether any is left.

    Only processes that this job started get a signal (see `topoplan.run.programs`), also those that it left running
    when it ended. The host carries on if the connection is lost. `deadline_s` must exceed `grace_s + SETTLE_S`. Raises
    HostError, as `node_state`.
    """
    words = (_path_argument(run_dir), _run_name(run_dir), *_times(grace_s), *_identity(started))
    done = connection.run(programs.STOP, *words, deadline_s=deadline_s)
    values = key_values(done)
    if done.code != 0 or "found" not in values:
        _refuse(connection, done, run_dir)
    return Stopped(
        was_running=bool(_pids(values["found"])),
        left=_pids(values.get("left")),
        code=_number(values.get("code")),
        suspects=tuple(_suspects(values)),
        directory=_directory(values),
        gpus_unseen="gpus_unseen" in values,
    )


def suspect_text(process: SuspectProcess) -> str:
    """`process 4711 (python worker.py), started 2030-01-31 12:00:00 UTC, holds a file of this run open`."""
    since = f"{datetime.fromtimestamp(process.since_unix_s, UTC):%Y-%m-%d %H:%M:%S}"
    holds = "holds a file of this run open" if process.holds == "file" else "uses a GPU"
    return f"process {process.pid} ({process.command}), started {since} UTC, {holds}"


def suspect_remedy(processes: Sequence[SuspectProcess]) -> str:
    """Return what to do about processes that nothing proves to be the job's."""
    pids = [str(one.pid) for one in processes]
    return (
        f"check with `ps -fp {','.join(pids)}` on that host; if {'it belongs' if len(pids) == 1 else 'they belong'} to"
        f" the run, `kill {' '.join(pids)}`"
    )


def directory_problem(directory: Directory) -> str:
    """Return what is wrong with a run directory, as a phrase; empty if nothing is."""
    return {
        "there": "",
        "gone": "its run directory is missing",
        "closed": "its run directory cannot be entered",
        "foreign": "its run directory is not private to this user",
        "damaged": "started.json in its run directory is damaged",
    }[directory]


def job_words(run_dir: str, started: Started | None) -> tuple[str, ...]:
    """Return arguments of the programs that look for a job."""
    return (_path_argument(run_dir), _run_name(run_dir), *_identity(started))


def _path_argument(run_dir: str) -> str:
    """Return a run directory as an argument; a leading `./` keeps a relative one from being taken for an option."""
    return run_dir if run_dir.startswith("/") else f"./{run_dir}"


def _run_name(run_dir: str) -> str:
    """Return the name of the run on the host, which is also part of the mark of its processes."""
    return posixpath.basename(run_dir.rstrip("/"))


def _times(grace_s: float) -> tuple[str, str]:
    """Return arguments of `stop` for the grace period and the wait after SIGKILL, in hundredths of a second."""
    return str(round(100 * grace_s)), str(round(100 * SETTLE_S))


def _identity(started: Started | None) -> tuple[str, str, str]:
    """Return what the client knows of the job's first process, as arguments; empty strings if unknown."""
    return ("", "", "") if started is None else (str(started.pid), str(started.start_ticks), started.boot_id)


def key_values(done: Completed) -> dict[str, str]:
    """Return the lines `topoplan:KEY=VALUE` in a program's output, as a dictionary."""
    found = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        mark, _, rest = line.partition(":")
        key, equals, value = rest.partition("=")
        if mark == "topoplan" and equals:
            found[key] = value.strip()
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _seconds(text: str | None) -> float | None:
    found = re.match(r"[0-9]{1,15}(?:\.[0-9]{1,9})?", text or "", re.ASCII)
    return float(found[0]) if found else None


def _pids(text: str | None) -> tuple[int, ...]:
    return tuple(sorted(int(word) for word in (text or "").split() if word.isdecimal()))


def _directory(values: Mapping[str, str]) -> Directory:
    found = values.get("directory")
    return cast(Directory, found) if found in get_args(Directory) else "there"


def _suspects(values: Mapping[str, str]) -> Iterator[SuspectProcess]:
    for key, value in values.items():
        word, _, pid = key.partition(".")
        since, _, rest = value.partition(" ")
        holds, _, command = rest.partition(" ")
        if word == "may_be" and pid.isdecimal() and holds in ("file", "GPU"):
            yield SuspectProcess(
                pid=int(pid),
                holds=cast(Literal["file", "GPU"], holds),
                since_unix_s=_number(since) or 0,
                command=shown_line(command.strip().encode()),
            )


def _started(text: str, connection: Connection, run_dir: str) -> Started:
    try:
        return TypeAdapter(Started).validate_json(text)
    except ValueError:
        _damaged(connection, run_dir)


def _refuse(connection: Connection, done: Completed, run_dir: str, script: str = "") -> NoReturn:
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    # Shells prefix their position (`bash: line 3: `), which is of no use to a reader.
    words = re.sub(r"^(?:\S*sh|topoplan): (?:line )?\d+: ", "", lines[-1])[:300] if lines else ""
    if done.code == ExitCode.DAMAGED:
        _damaged(connection, run_dir)
    refusals: dict[int, tuple[str, str]] = {
        ExitCode.NO_DIRECTORY: (
            f"cannot enter the run directory {run_dir}: {_reason(words)}",
            "check `workdir` of the host in the spec",
        ),
        ExitCode.NOT_OURS: (
            f"{run_dir} is not private to this user: {words}",
            "check who created it, or name another `workdir` for the host in the spec",
        ),
        ExitCode.CHANGED: (
            f"nothing was started: {words} in {run_dir} differs from what was uploaded",
            "check who can write there, and launch again",
        ),
        ExitCode.NO_PROC: ("its /proc cannot be read, so processes cannot be found", "mount /proc there"),
        ExitCode.NO_SCRIPT: (f"no script {script} in {run_dir}", "upload the bundle first"),
        ExitCode.NO_SETSID: ("no `setsid` on the host", "install util-linux there"),
        ExitCode.ALREADY: (
            f"a job of this run is already in {run_dir}",
            "see `topoplan runs status`; start another run instead",
        ),
        ExitCode.NOT_STARTED: (
            f"the job was not started, because {run_dir}/.topoplan cannot be written: {_reason(words)}",
            "make room, or name another `workdir` for the host in the spec",
        ),
    }
    unknown = (f"a command of topoplan failed in {run_dir}: {words or f'exit code {done.code}'}", "")
    what, remedy = refusals.get(done.code or 0, unknown)
    raise HostError(what, host=connection.name, problem="command", remedy=remedy)


def _reason(words: str) -> str:
    """Return the last part of `mkdir: cannot create directory 'x': No space left on device`, which is the system's."""
    return words.rpartition(": ")[2] or "no reason given"


def _damaged(connection: Connection, run_dir: str) -> NoReturn:
    raise HostError(
        f"{run_dir}/.topoplan/started.json is damaged",
        host=connection.name,
        problem="command",
        remedy="check what is running there, and stop it by hand",
    )
