"""Bundles for the hosts of a bed, with a stand-in for the trainer's Python whose behavior is set per host."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.bed.bed import Bed
from tests.bed.watched import texts
from tests.bundle.samples import CLUSTER, QWEN3_8B, make_spec_and_plan
from tests.bundle.test_node_script import fill
from tests.waiting import LIMIT_S, eventually, wait_until
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.planner.predict import predict
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.ssh_config import Target
from topoplan.run.bundle_reader import Bundle, read_bundle
from topoplan.run.diagnose import Diagnosis
from topoplan.run.events import Event
from topoplan.run.failure import Failure
from topoplan.run.launch import LaunchSession
from topoplan.run.node import stop_node
from topoplan.run.outcome import record_stop_request
from topoplan.run.record import RunRecord, load
from topoplan.run.session import Outcome
from topoplan.run.settings import Settings
from topoplan.specs.cluster import Host

NAMES = ("one", "two", "three", "four")
LABELS = [f"node-{node:02d}" for node in range(len(NAMES))]
_LONGEST_S = 3 * LIMIT_S
"""Limit for one launch of a test, however slow the machine is."""
PYTHON = r"""#!/bin/bash
[[ "$1" == - || "$1" == -c ]] && exit 0
. "${BASH_SOURCE[0]%/*}/../does"
"""
SETTINGS = Settings(grace_s=0.5, connect_s=LIMIT_S, upload_s=LIMIT_S, start_s=LIMIT_S, stop_s=LIMIT_S, drain_s=LIMIT_S)


@dataclass
class Ran:
    """A finished launch."""

    outcome: Outcome
    events: list[Event]
    took_s: float

    @property
    def failure(self) -> Failure:
        return self.outcome.failure

    @property
    def diagnosis(self) -> Diagnosis:
        assert self.failure.diagnosis is not None, self.failure.tail
        return self.failure.diagnosis

    def of(self, kind: str, node: str = "") -> list[str]:
        return texts(self.events, kind, node)


@dataclass
class Hosts:
    """Four hosts of a bed, and the bundle for them."""

    bed: Bed
    root: Path
    bundle_dir: Path
    state: Path
    events: list[Event] = field(default_factory=list)
    clients: list[subprocess.Popen[Any]] = field(default_factory=list)

    def workdir(self, name: str) -> Path:
        return self.root / name / "work"

    def does(self, *scripts: str, **by_name: str) -> None:
        """Set what the trainer does on each host, as bash code: one script for all hosts, or one for each."""
        texts = dict.fromkeys(NAMES, scripts[0] if scripts else "exit 0") | by_name
        for name, text in texts.items():
            self.does_on(name, text)

    def does_on(self, name: str, text: str) -> None:
        """Set what the trainer does on one host."""
        (self.root / name / "does").write_text(text + "\n")

    @property
    def bundle(self) -> Bundle:
        return read_bundle(self.bundle_dir)

    def targets(self, **changes: Mapping[str, object]) -> dict[str, Target]:
        """Return the targets by node name; `changes` are keyed by host name."""
        return {f"node-{index:02d}": self.bed.target(name, **changes.get(name, {})) for index, name in enumerate(NAMES)}

    def launch(
        self,
        *,
        settings: Settings = SETTINGS,
        targets: dict[str, Target] | None = None,
        on: Callable[[Event], None] = lambda event: None,
        **options: Any,
    ) -> Ran:
        """Launch in this process."""
        self.events = []

        def tell(event: Event) -> None:
            self.events.append(event)
            on(event)

        started = time.monotonic()
        session = LaunchSession(
            self.bundle, targets or self.targets(), Access(), settings=settings, tell=tell, **options
        )
        outcome = session.go()
        return Ran(outcome=outcome, events=self.events, took_s=time.monotonic() - started)

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "topoplan", "launch", str(self.bundle_dir), "--no-preflight", *options]

    def environment(self) -> dict[str, str]:
        """Environment in which the bed's key and known hosts are the user's own."""
        mine = {"HOME": str(self.bed.home), "XDG_STATE_HOME": str(self.state), "PYTHONUNBUFFERED": "1"}
        return os.environ | mine | {"SSH_AUTH_SOCK": ""}

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Launch as a user does, in a separate process, for which no test waits without a time limit."""
        process: subprocess.Popen[str] = self.client(*options, stdout=subprocess.PIPE, text=True, errors="replace")
        threading.Thread(target=_end_late, args=(process,), daemon=True).start()
        return process

    def client(self, *options: str, **how: Any) -> subprocess.Popen[Any]:
        """Start a launch process that is ended with this program.

        A client waits for hosts that cannot be seen for as long as it lives.
        """
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *self.command(*options)],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **how,
        )
        self.clients.append(process)
        return process

    def end_clients(self) -> None:
        """End the clients that a test has left."""
        for process in self.clients:
            process.kill()
            process.wait()
        self.clients.clear()

    def record(self) -> RunRecord:
        return load()

    def wait_for_all(self, words: str) -> None:
        """Wait until all jobs of the last run have written these words."""
        logs = [Path(node.run_dir, ".topoplan", "log") for node in load().nodes]
        wait_until(lambda: all(words in log.read_text() for log in logs), f"all have written {words}")

    def stop_from_another_client(self, grace_s: float = 0.5) -> None:
        """Stop the last run with its record, as `topoplan runs stop` does."""
        record_stop_request(load().run_id, grace_s)
        for node, name in zip(load().nodes, NAMES, strict=True):
            with connect(self.bed.target(name), Access(), deadline_s=LIMIT_S) as connection:
                stopped = stop_node(
                    connection, node.run_dir, started=node.started, grace_s=grace_s, deadline_s=grace_s + LIMIT_S
                )
                assert stopped.is_over, stopped

    def jobs(self) -> dict[str, list[str]]:
        """Return the processes on the hosts except sshd and what it runs for clients that look."""
        found = {}
        for name in NAMES:
            lines = [line for line in self.bed.processes(name).values() if not line.startswith("sshd")]
            if lines:
                found[name] = lines
        return found

    def assert_nothing_is_left(self) -> None:
        self.assert_jobs_are_on()

    def assert_jobs_are_on(self, *names: str) -> None:
        """Assert that jobs run on these hosts only; what a client has left there takes a moment to end."""
        eventually(lambda: set(self.jobs()) <= set(names))
        left = self.jobs()
        assert set(left) == set(names), left


class After:
    """Interrupts once an event with these words has come from all named nodes."""

    def __init__(self, words: str, *nodes: str) -> None:
        self.words, self.waiting, self.seen = words, set(nodes or ("",)), False

    def __call__(self, event: Event) -> None:
        if self.words in event.text:
            self.waiting.discard(event.node if "" not in self.waiting else "")
            self.seen = self.seen or not self.waiting

    def count(self) -> int:
        return int(self.seen)


class Once:
    """Does something once all named nodes have written these words; without names, once the run has."""

    def __init__(self, words: str, job: Callable[[], object], *nodes: str) -> None:
        self._after, self._job = After(words, *(nodes or LABELS)), job

    def __call__(self, event: Event) -> None:
        before = self._after.seen
        self._after(event)
        if self._after.seen and not before:
            self._job()


def both(*listeners: Callable[[Event], None]) -> Callable[[Event], None]:
    def on(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return on


class StopAfter:
    """Another client stops the run as soon as an event has come, for a launch or a watching session."""

    def __init__(self, hosts: Hosts, after: After, *, grace_s: float = 0.5) -> None:
        self._after = after
        self._stopper = threading.Thread(target=hosts.stop_from_another_client, args=(grace_s,))

    def __call__(self, event: Event) -> None:
        self._after(event)
        if self._after.seen and self._stopper.ident is None:
            self._stopper.start()

    def join(self) -> None:
        self._stopper.join()


def _end_late(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_LONGEST_S)
    except subprocess.TimeoutExpired:
        process.kill()


def hosts_of(bed: Bed, root: Path, *, gpus: int = 2, **cluster: Any) -> Hosts:
    """Create directories, stand-ins and a bundle for the four hosts, of one or two GPUs each."""
    known = []
    for name in NAMES:
        workdir, venv = root / name / "work", root / name / "venv"
        fill(workdir, model=f"models/{QWEN3_8B.name}")
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").write_text(PYTHON.replace("/../does", "/../../does"))
        (venv / "bin" / "python").chmod(0o755)
        known.append(
            Host(
                address=bed[name].address,
                port=None if bed[name].port == 22 else bed[name].port,
                workdir=str(workdir),
                venv=str(venv),
                socket_interface="eth0",
            )
        )
    size = {"nodes": 4, **dict.fromkeys(("gpus_per_node", "nvlink_domain_gpus", "nics_per_node"), gpus)}
    spec, plan = make_spec_and_plan(
        cluster=replace(CLUSTER, name=f"bed-{bed.number}", **size, hosts=tuple(known), **cluster),
        model=QWEN3_8B,
        tp=gpus,
        pp=1 if gpus > 1 else 4,
    )
    write_bundle(generate(spec, predict(spec, plan.layout)), root / "bundle")
    hosts = Hosts(bed=bed, root=root, bundle_dir=root / "bundle", state=root / "state")
    hosts.does()
    return hosts


def read_until(process: subprocess.Popen[str], words: str, count: int = 1) -> list[str]:
    """Read the output of a process until so many lines have these words; return what was read."""
    said: list[str] = []
    while sum(words in line for line in said) < count and (line := process.stdout.readline()):
        said.append(line)
    return said
