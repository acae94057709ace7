"""Jobs of one run that supervise each other, in the shells of this machine, without a watching client."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.run.this_host import Host
from tests.waiting import LIMIT_S, eventually
from topoplan.run.node import Peers

LONG = "sleep 600"


@dataclass
class Run:
    """Three nodes, which meet on a port of this machine."""

    hosts: list[Host]
    peers: Peers

    def start(self, *scripts: str, lacking: int | None = None, first_meet_s: float | None = None) -> None:
        """Start all nodes concurrently, except for one that never comes. The first may wait less long."""

        def one(node: int) -> None:
            host, meet_s = self.hosts[node], self.peers.meet_s if node or first_meet_s is None else first_meet_s
            peers = replace(self.peers, meet_s=meet_s)
            host.start(scripts[node], lines=peers.lines(node, str(host.run_dir)))

        nodes = [node for node in range(len(scripts)) if node != lacking]
        threads = [threading.Thread(target=one, args=(node,)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def go(self, node: int) -> None:
        """Let a script continue that waits for the file `go`."""
        (self.hosts[node].run_dir / "go").touch()

    def log(self, node: int) -> str:
        return (self.hosts[node].run_dir / ".topoplan" / "log").read_text()

    def begun(self, *nodes: int) -> bool:
        return eventually(lambda: all("begun" in self.log(node) for node in nodes))

    def ends(self, node: int) -> tuple[str, str]:
        """Return a node's exit code, and why its host ended it, once nothing of it is left."""
        host = self.hosts[node]
        assert eventually(lambda: (said := host.state())["state"] in ("ended", "gone") and not said.get("pids"))
        return host.state()["code"], host.state().get("stopped", "")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    hosts = [Host(run_dir=tmp_path / f"node-{node}" / f"run-{tmp_path.name}-{node}") for node in range(3)]
    with socket.socket() as held:  # so that nobody else gets the port; who listens at it reuses the address, too
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        limits_s = {"meet_s": 30, "end_after_s": 0.5, "grace_s": LIMIT_S}
        yield Run(hosts, Peers(nodes=3, address="127.0.0.1", port=held.getsockname()[1], token="abc", **limits_s))
        for host in hosts:
            if host.run_dir.exists() and host.state().get("pids"):
                host.stop(0)


WAITS = "echo begun; until [ -e go ]; do sleep 0.02; done; "
FAILS = "echo begun; exit 7"


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ((LONG, FAILS, LONG), [("143", "node-01 failed"), ("7", ""), ("143", "node-01 failed")]),
        ((FAILS, LONG, LONG), [("7", ""), ("143", "node-00 failed"), ("143", "node-00 failed")]),
        # A good end is no reason, even that of the node to which all are connected.
        (("echo begun", "sleep 1.2", FAILS.replace("7", "0")), [("0", ""), ("0", ""), ("0", "")]),
    ],
)
def test_a_node_that_fails_ends_the_others(run: Run, scripts: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    run.start(*scripts)
    assert [run.ends(node) for node in range(3)] == expected


def test_only_the_first_failure_counts_and_the_others_have_the_time_to_end_by_themselves(run: Run) -> None:
    run.peers = replace(run.peers, end_after_s=8)
    run.start(LONG, FAILS, f"{WAITS} exit 7")
    assert run.ends(1) == ("7", "")
    run.go(2)
    assert [run.ends(node) for node in (0, 2)] == [("143", "node-01 failed"), ("7", "")]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_on_which_all_was_killed_ends_the_others(run: Run, victim: int) -> None:
    run.start(*["echo begun; sleep 600"] * 3)
    assert run.begun(0, 1, 2)
    kill_at_once(run.hosts[victim])
    others = [node for node in range(3) if node != victim]
    assert [run.ends(node) for node in others] == [("143", f"node-{victim:02d} is gone")] * 2
    assert "no client stopped this node" in run.log(others[0])


def kill_at_once(host: Host) -> None:
    """Kill all processes as a power failure would: all are stopped first, so that none sees another die."""
    for held in (signal.SIGSTOP, signal.SIGKILL):
        for pid in host.state()["pids"].split():
            with contextlib.suppress(ProcessLookupError):  # a process that lived only for a moment
                os.kill(int(pid), held)


@pytest.mark.parametrize("code", [0, 7])
def test_a_supervisor_that_is_killed_alone_ends_nobody(run: Run, code: int) -> None:
    run.start(WAITS, f"{WAITS} exit {code}", "echo begun; sleep 600")
    assert run.begun(0, 1, 2)
    os.kill(supervisor(run.hosts[1]), signal.SIGKILL)
    run.go(1)
    assert run.ends(1) == (str(code), "")
    # The others still learn of its end.
    if code == 0:
        time.sleep(4 * run.peers.end_after_s)
        run.go(0)
        assert run.ends(0) == ("0", "")
        assert run.hosts[2].state()["state"] == "running"
    else:
        assert [run.ends(node) for node in (0, 2)] == [("143", "node-01 failed")] * 2


def test_the_first_one_that_is_killed_is_started_again_and_passes_on_who_failed(run: Run) -> None:
    run.start("echo begun; sleep 600", "echo begun; sleep 600", f"{WAITS} exit 7")
    assert run.begun(0, 1, 2)
    os.kill(supervisor(run.hosts[0]), signal.SIGKILL)
    run.go(2)
    assert [run.ends(node) for node in range(3)] == [("143", "node-02 failed")] * 2 + [("7", "")]


def supervisor(host: Host) -> int:
    found: list[int] = []

    def is_found() -> bool:
        found.clear()
        for pid in host.state().get("pids", "").split():
            with contextlib.suppress(OSError, ValueError):  # one that lived for a moment
                python, option, *_ = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if python.endswith(b"python3") and option == b"-I":
                    found.append(int(pid))
        return len(found) == 1  # a holder that is about to be one looks like its parent

    assert eventually(is_found)
    return found[0]


def test_signals_that_come_together_leave_no_word_in_the_log(run: Run) -> None:
    run.start("echo begun; sleep 600", "echo begun; sleep 600", "echo begun; sleep 600")
    assert run.begun(0, 1, 2)
    pid = supervisor(run.hosts[0])
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT):
        os.kill(pid, number)
    assert [run.ends(node) for node in (1, 2)] == [("143", "node-00 failed")] * 2
    assert run.log(0) == "begun\n"


def test_they_start_without_one_that_does_not_come_and_end_it_by_name(run: Run) -> None:
    run.start(LONG, LONG, f"{WAITS} exit 7", lacking=1, first_meet_s=5.0)
    run.go(2)
    assert run.ends(0) == ("143", "node-02 failed")
    assert "not all nodes connected to each other in time" in run.log(0)


@pytest.mark.parametrize(("grace_s", "code"), [(LIMIT_S, "143"), (0, "137")])
def test_one_that_is_stopped_while_it_waits_for_the_others_never_begins(run: Run, grace_s: float, code: str) -> None:
    host = run.hosts[0]
    host.start("echo begun", lines=run.peers.lines(0, str(host.run_dir)))
    assert host.stop(grace_s)["left"] == ""
    assert run.ends(0) == (code, "")
    assert "begun" not in run.log(0)


def test_a_node_whose_supervisor_is_killed_before_it_met_the_others_begins_without_one(run: Run) -> None:
    host = run.hosts[0]
    host.start("echo begun; exit 7", lines=run.peers.lines(0, str(host.run_dir)))
    os.kill(supervisor(host), signal.SIGKILL)
    assert run.ends(0) == ("7", "")
    assert "supervisor ended with code 137" in run.log(0)
    assert "begun" in run.log(0)


def test_who_does_not_know_the_token_is_not_heard(run: Run) -> None:
    host = run.hosts[0]
    two = replace(run.peers, nodes=2, meet_s=6.0)
    host.start("echo begun; sleep 1", lines=two.lines(0, str(host.run_dir)))
    strangers: list[socket.socket] = []

    def is_let_in() -> bool:
        with contextlib.suppress(OSError):
            strangers.append(socket.create_connection((two.address, two.port)))
        return bool(strangers)

    assert eventually(is_let_in)
    strangers[0].sendall(b"xyz 1\nfailed node-01 failed\n")
    for said in (b"\n", b"abc\n", b"abc x\n"):
        with contextlib.suppress(OSError):  # too late, on a busy machine
            strangers.append(socket.create_connection((two.address, two.port)))
            strangers[-1].sendall(said)
    assert run.ends(0) == ("0", "")
    assert "Traceback" not in run.log(0)
    for stranger in strangers:
        stranger.close()
