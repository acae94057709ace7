"""One bed for all tests of a process. A test that damages it has to repair it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.bed import Bed, Machine, probe
from tests.bed.jobs import NAMES, Hosts, hosts_of
from tests.bed.logins import log_in
from tests.bed.watched import Jobs
from topoplan.remote.connection import Connection

MACHINES = (
    Machine(name="alpha"),
    Machine(name="beta"),
    Machine(name="bare"),
    Machine(name="few", options=("MaxStartups 2:100:2",)),
    Machine(name="strict", options=("MaxAuthTries 2",)),
    Machine(name="jump", networks=("outer", "inner")),
    Machine(name="gate", networks=("inner", "deep")),
    Machine(name="inside", networks=("inner",)),
    Machine(name="inside2", networks=("inner",)),
    Machine(name="far", networks=("deep",)),
    Machine(name="closed", options=("AllowTcpForwarding no",)),
)


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Machines that are reached like real ones."""
    kind, reason = probe()
    if kind is None:
        pytest.skip(f"no sshd to log in to: {reason}")
    with Bed(tmp_path_factory.mktemp("bed"), MACHINES) as made:
        yield made


@pytest.fixture
def alpha(bed: Bed) -> Iterator[Connection]:
    """A connection to one of the machines."""
    with log_in(bed.target("alpha")) as connection:
        yield connection


@pytest.fixture
def cables(bed: Bed) -> Bed:
    """The bed, if it has networks that can be cut."""
    if bed.kind != "namespaces":
        pytest.skip(f"no network namespaces here: {probe()[1]}")
    return bed


@pytest.fixture
def jobs(bed: Bed, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Two machines of the bed, for jobs that are watched."""
    home = f"{bed['alpha'].directory}/home/{request.node.name.partition('[')[0]}-{time.monotonic_ns()}"
    made = Jobs(bed, home, tmp_path, ("alpha", "beta"))
    made.let_in.set()
    yield made
    made.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Four machines for complete launches."""
    kind, reason = probe()
    if kind != "namespaces":
        pytest.skip(f"no network namespaces here: {reason}")
    with Bed(tmp_path_factory.mktemp("four"), [Machine(name=name) for name in NAMES]) as bed:
        yield bed


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timeouts for hosts that are gone: the kernels of this network answer within a millisecond."""
    monkeypatch.setattr("topoplan.remote.wire._TCP_SILENT_S", 1.2)
    monkeypatch.setattr("topoplan.run.reachability.REPORT_AFTER_S", 4.0)
    monkeypatch.setattr("topoplan.run.following._TRY_S", 2.0)
    monkeypatch.setattr("topoplan.run.stopping._LOST_S", 5.0)


@pytest.fixture
def hosts(
    request: pytest.FixtureRequest, four: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> Iterator[Hosts]:
    """Four hosts with directories, stand-ins for the trainer and a bundle; each test must leave nothing running.

    The parameter, if there is one, has other keys for the cluster.
    """
    made = hosts_of(four, tmp_path, **getattr(request, "param", {}))
    monkeypatch.setenv("XDG_STATE_HOME", str(made.state))
    yield made
    try:
        made.assert_nothing_is_left()
    finally:
        # Clean up whatever a test left, so that the next one starts on clean hosts.
        made.end_clients()
        for name in NAMES:
            for pid, line in four.processes(name).items():
                if not line.startswith("sshd"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
