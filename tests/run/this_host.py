"""This machine as a host, for tests of the programs that run on hosts."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import LIMIT_S, eventually
from topoplan.run import programs
from topoplan.run.node import NO_PEERS

WHOLE = f"{programs.WHOLE}\n".encode()

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="another user needs root")
OTHER_USER = 4242
"""A user id that does not exist on this machine."""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stat_field(pid: int, number: int) -> str:
    """Return a field of proc_pid_stat(5), from 3 on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number - 3]


@dataclass
class Host:
    """This machine, as a host."""

    run_dir: Path
    sh: str = "sh"
    """The shell of a job's first process, which is `sh` on a host; programs of clients are run by bash."""

    def program(self, text: str, *words: str, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
        command = ["bash", "-c", text, "bash", *words]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=2 * LIMIT_S, **options)

    def start(self, script: str, environment: bytes = b"", *, lines: str = NO_PEERS) -> dict[str, Any]:
        done = self.try_to_start(script, environment, lines=lines)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert isinstance(record, dict)
        return record

    def begin(self, script: str) -> dict[str, Any]:
        """Start a job, and wait until it has written `up`."""
        record = self.start(script)
        assert eventually(lambda: self.log() == b"up\n")
        return record

    def finish(self, script: str) -> None:
        """Start a job, and wait for its end."""
        self.start(script)
        assert eventually(self.ended)

    def try_to_start(
        self,
        script: str,
        environment: bytes = b"",
        *,
        sums: str = "",
        lines: str = NO_PEERS,
        whole: bytes = WHOLE,
        **options: Any,
    ) -> subprocess.CompletedProcess[bytes]:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # In one step, as with an upload: bash reads a script while it runs it, and may only be starting to.
        (self.run_dir / "node.sh.part").write_text(script)
        (self.run_dir / "node.sh.part").replace(self.run_dir / "node.sh")
        words = (str(self.run_dir), "node.sh", self.run_dir.name, self.keeper, sums, "")
        return self.program(programs.START, *words, stdin=lines.encode() + environment + whole, **options)

    @property
    def keeper(self) -> str:
        return programs.LEADER if self.sh == "sh" else f'exec {self.sh} -c {_quoted(programs.LEADER)} topoplan "$@"'

    def state(self, *told: str) -> dict[str, str]:
        return self.said(programs.STATE, str(self.run_dir), self.run_dir.name, *told)

    def stop(self, grace_s: float = LIMIT_S, *told: str, **options: Any) -> dict[str, str]:
        times = (str(round(100 * grace_s)), "500")
        return self.said(programs.STOP, str(self.run_dir), self.run_dir.name, *times, *told, **options)

    def said(self, text: str, *words: str, **options: Any) -> dict[str, str]:
        done = self.program(text, *words, **options)
        assert (done.returncode, done.stderr) == (0, b"")
        lines = [line.removeprefix("topoplan:") for line in done.stdout.decode().splitlines()]
        return {line.partition("=")[0]: line.partition("=")[2].strip() for line in lines}

    def ended(self) -> bool:
        return (self.run_dir / ".topoplan" / "exit").exists()

    def log(self) -> bytes:
        return (self.run_dir / ".topoplan" / "log").read_bytes()

    def recorded(self, **changes: Any) -> None:
        """Change values in started.json."""
        path = self.run_dir / ".topoplan" / "started.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes) + "\n")


def told(record: dict[str, Any]) -> tuple[str, str, str]:
    """Return what the client knows of a started job, as the last arguments of a program."""
    return str(record["pid"]), str(record["start_ticks"]), str(record["boot_id"])


def instead(directory: Path, **programs: str) -> dict[str, str]:
    """Return an environment in which shell scripts replace programs."""
    directory.mkdir()
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    return os.environ | {"PATH": f"{directory}:{os.environ['PATH']}"}


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@contextlib.contextmanager
def somebody_elses() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own that does not belong to any job."""
    with subprocess.Popen(["sleep", "3000"], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    shell = getattr(request, "param", "sh")
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    # All hosts of all tests on this machine see the same processes, so no two runs may have the same name.
    place = tmp_path / f"run-{secrets.token_hex(8)}"
    yield Host(place, shell)

    def are_gone() -> bool:
        left = processes_of(place)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    eventually(are_gone)


in_each_shell = pytest.mark.parametrize("host", ["bash", "dash"], indirect=True)
"""Hosts differ in what their `sh` is."""


def programs_in(place: Path) -> list[str]:
    """Return the command lines of the processes of a place."""
    found = []
    for pid in processes_in(place):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
    return found


def processes_of(place: Path) -> list[int]:
    """Return the processes below `place`, and those with its unique name in their arguments or environment."""
    assert re.fullmatch("run-[0-9a-f]{16}", place.name)
    found = processes_in(place)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if place.name.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def processes_in(place: Path) -> list[int]:
    """Return the processes whose working directory is below `place`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink().is_relative_to(place):
                found.append(int(entry.name))
    return found
