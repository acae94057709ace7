"""Real runs of node scripts on simulated machines, and what their processes report."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "TOPOPLAN_TEST_MARK"
"""Environment variable of everything started here, with a unique value for each start."""

LIMIT_S = 300.0
"""Far above the duration of any of these tests, so that a hang fails one test instead of blocking all."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    address: str
    interface: str
    enter: tuple[str, ...] = ()
    """The command prefix that runs a command on this machine."""


def stand_in_trainer(folder: Path, launcher: str) -> dict[str, str]:
    """Create what a node script looks for in `folder`; only the launcher actually does something.

    Returns the environment in which it is found. The tests' torch may be newer than what the trainer accepts.
    """
    for package in ("llamafactory", "mcore_adapter", "megatron", "megatron/core", "transformer_engine"):
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").touch()
    (folder / "llamafactory" / "launcher.py").write_text(launcher)
    return {"PYTHONPATH": str(folder), "TOPOPLAN_ANY_VERSIONS": "1"}


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[Machine, Machine]]:
    """Provide two network namespaces connected by a cable. Raises OSError if they cannot be created."""
    names = [f"topoplan-{uuid.uuid4().hex[:8]}-{node}" for node in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        cable = ["link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]]
        _ip(*cable)
        for node, name in enumerate(names):
            _ip("-n", name, "address", "add", f"10.0.0.{node + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        first, second = (
            Machine(address=f"10.0.0.{node + 1}", interface="eth0", enter=("ip", "netns", "exec", name))
            for node, name in enumerate(names)
        )
        yield first, second


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def loopback() -> Iterator[tuple[Machine, Machine]]:
    """Provide two loopback addresses of this machine."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    yield Machine(address="127.0.0.1", interface=interface), Machine(address="127.0.0.2", interface=interface)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Provide namespaces if they can be created, otherwise loopback addresses."""
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(namespaces())
        except OSError:
            pair = stack.enter_context(loopback())
        yield pair


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running or finished node script."""

    process: subprocess.Popen[bytes]
    output: Path
    mark: str

    @property
    def text(self) -> str:
        """Return its output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {LIMIT_S} s:\n{self.text[-4000:]}") from None

    def kill_rank(self, rank: int) -> None:
        """Kill a rank like the kernel's OOM killer. The launcher notices, ends the other ranks and fails."""
        pids = [pid for pid in self.left() if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(min(pids), signal.SIGKILL)
        assert self.wait() != 0
        wait_until("all ranks have ended", lambda: not self.left())

    def left(self) -> dict[int, str]:
        """Return process id -> command line of the script and its descendants that are still running."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found


@dataclass(frozen=True)
class Nodes:
    """Starts node scripts."""

    folder: Path
    started: list[Started] = field(default_factory=list)

    def start(
        self, script: Path, *arguments: str, machine: Machine | None = None, env: Mapping[str, str] | None = None
    ) -> Started:
        """Run the script as a person would, in a separate shell with a minimal environment."""
        mark = uuid.uuid4().hex
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LANG": "C.UTF-8", MARK: mark}
        output = self.folder / f"{script.name}.{len(self.started)}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*(machine.enter if machine else ()), "bash", str(script), *arguments],
                env=environment | dict(env or {}),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(Started(process=process, output=output, mark=mark))
        return self.started[-1]


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    """Provide a `Nodes`; remaining processes are killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Nodes(folder)
    try:
        yield running
    finally:
        for one in running.started:
            for process in one.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            one.process.wait()


def wait_until(what: str, condition: Callable[[], object], started: Sequence[Started] = ()) -> None:
    """Wait until the condition holds; fail on a timeout, or if one of the `started` scripts has ended."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        for one in started:
            code = one.process.poll()
            assert code is None, f"ended with {code} before {what}:\n{one.text[-4000:]}"
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)
