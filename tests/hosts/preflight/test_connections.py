import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.hosts.fleets import address, cluster, facts, fleet, needs
from topoplan.errors import HostError
from topoplan.hosts.preflight.connections import (
    SCRIPT,
    Listening,
    Peer,
    arguments,
    connection_results,
    peer_line,
    peers_of,
    read_listening,
    read_results,
)
from topoplan.hosts.preflight.fleet import Fleet
from topoplan.hosts.result import Result

PLANNED = fleet(facts(0), facts(1), facts(2), wanted=needs())
LISTENING: dict[str, Listening | str | HostError] = {
    "n0": Listening(ports=(41000, 42000), master=""),
    "n1": Listening(ports=(41001, 42001)),
    "n2": Listening(ports=(41002, 42002)),
}
LOST = HostError("the connection was lost", host="n1", problem="lost", remedy="check the machine")


def results(of: Fleet = PLANNED, **failed: str) -> dict[str, dict[Peer, str]]:
    """Return each host's results; `n1_n2="timed out"` means no connection from n1 to n2, `n1_master` to node 0."""
    found = {}
    for node in of.nodes:
        found[node.name] = {
            peer: failed.get(f"{node.name}_{'master' if peer.is_master else peer.name}", "")
            for peer in peers_of(of, node, LISTENING)
        }
    return found


def by_place(checks: Sequence[Result]) -> dict[tuple[str, str], Result]:
    return {(check.name, check.host): check for check in checks}


def test_each_host_connects_to_all_others_and_every_host_to_the_rendezvous() -> None:
    peers = tuple(peers_of(PLANNED, PLANNED.nodes[1], LISTENING))
    assert {(peer.name, peer.address, peer.port, peer.is_master) for peer in peers} == {
        ("n0", address(0), 23456, True),
        ("n0", address(0), 41000, False),
        ("n0", address(0), 42000, False),
        ("n2", address(2), 41002, False),
        ("n2", address(2), 42002, False),
    }
    own = tuple(peers_of(PLANNED, PLANNED.nodes[0], LISTENING))
    assert [peer.is_master for peer in own if peer.name == "n0"] == [True]


def test_only_ports_that_listen_are_tried() -> None:
    some = {**LISTENING, "n0": Listening(ports=(41000,), master="address already in use"), "n1": "no python3"}
    assert {peer.name for peer in peers_of(PLANNED, PLANNED.nodes[2], some)} == {"n0"}
    assert not any(peer.is_master for peer in peers_of(PLANNED, PLANNED.nodes[2], some))


def test_all_is_open() -> None:
    checks = by_place(connection_results(PLANNED, LISTENING, results()))
    assert {check.outcome for check in checks.values()} == {"ok"}
    assert set(checks) == {(name, host) for name in ("master-port", "high-ports") for host in ("n0", "n1", "n2")}


def test_both_sides_of_a_cut_name_each_other() -> None:
    checks = by_place(connection_results(PLANNED, LISTENING, results(n1_n2="timed out", n2_n1="timed out")))
    assert {place for place, check in checks.items() if check.outcome == "failure"} == {
        ("high-ports", "n1"),
        ("high-ports", "n2"),
    }
    assert "no connection to n2 (10.0.0.3:41002 timed out; 10.0.0.3:42002 timed out)" in checks["high-ports", "n1"].what
    assert "32768 to 60999" in checks["high-ports", "n1"].remedy


def test_a_rendezvous_that_is_closed_to_one_host() -> None:
    checks = by_place(connection_results(PLANNED, LISTENING, results(n2_master="connection refused")))
    assert checks["master-port", "n2"].outcome == "failure"
    assert "10.0.0.1:23456: connection refused" in checks["master-port", "n2"].what
    assert checks["master-port", "n1"].outcome == "ok"


def test_a_rendezvous_that_node_0_cannot_listen_on() -> None:
    taken = {**LISTENING, "n0": Listening(ports=(41000,), master="address already in use")}
    tried = {node.name: dict.fromkeys(peers_of(PLANNED, node, taken), "") for node in PLANNED.nodes}
    checks = by_place(connection_results(PLANNED, taken, tried))
    assert checks["master-port", "n0"].outcome == "failure"
    assert "address already in use" in checks["master-port", "n0"].what
    assert checks["master-port", "n1"].outcome == "skipped"


def test_hosts_that_cannot_try() -> None:
    some = {**LISTENING, "n1": LOST, "n2": "no python3"}
    checks = by_place(connection_results(PLANNED, some, {"n0": {}, "n1": LOST, "n2": None}))
    assert [checks["high-ports", host].outcome for host in ("n0", "n1", "n2")] == ["skipped", "failure", "skipped"]
    assert checks["high-ports", "n1"].what == "the connection was lost"
    assert checks["high-ports", "n2"].what == "no python3"


def test_without_a_plan_there_is_no_rendezvous_to_try() -> None:
    of = fleet(facts(0), facts(1))
    assert {check.name for check in connection_results(of, LISTENING, results(of))} == {"high-ports"}
    _, task, _ = arguments(of, of.nodes[0], random.Random(0))
    assert json.loads(task)["master"] is None


def test_candidates_are_of_the_range_and_not_in_use() -> None:
    of = fleet(facts(0, port_range=(100, 109), listening_ports=frozenset(range(100, 107))), facts(1), wanted=needs())
    program, task, python = arguments(of, of.nodes[0], random.Random(0))
    assert sorted(json.loads(task)["candidates"]) == [107, 108, 109]
    assert python == "/venv/bin/python"
    assert "asyncio" in program
    empty = fleet(facts(0, port_range=(9, 3)), facts(1), of=cluster())
    assert json.loads(arguments(empty, empty.nodes[0], random.Random(0))[1])["candidates"] == []


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b'{"ports": 3}', b'{"ports": ["x"]}', b"[" * 100_000])
def test_garbled_answers_are_no_answers(line: bytes) -> None:
    assert isinstance(read_listening(line), str)
    assert read_results(line, [Peer(name="n0", address="a", port=1)]) is None


def test_a_host_without_python() -> None:
    assert "python3" in str(read_listening(b'{"lacks": "python3"}\n'))


# The program itself, on this machine ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def program(of: Fleet, number: int) -> Iterator[subprocess.Popen[bytes]]:
    code, task, _ = arguments(of, of.nodes[number], random.Random(number))
    with subprocess.Popen(
        ["sh", "-c", SCRIPT, "sh", code, task, sys.executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    return process.stdout.readline()


def test_the_program_listens_and_connects_and_ends_with_its_input() -> None:
    port = free_port()
    of = fleet(facts(0), facts(1), wanted=needs(master_port=port))
    with program(of, 0) as first, program(of, 1) as second:
        there = read_listening(line_of(first))
        assert there.master == ""
        assert len(there.ports) == 2
        assert isinstance(read_listening(line_of(second)), Listening)
        peers = [
            Peer(name="n0", address="127.0.0.1", port=port),
            Peer(name="n0", address="localhost", port=there.ports[0]),
            Peer(name="n1", address="127.0.0.1", port=there.ports[1]),
            Peer(name="n0", address="127.0.0.1", port=1),
        ]
        second.stdin.write(peer_line(peers))
        second.stdin.flush()
        found = read_results(line_of(second), peers)
        assert list(found.values()) == ["", "", "another program answers", "connection refused"]
        second.stdin.close()
        first.stdin.close()
        assert (first.wait(10), second.wait(10)) == (0, 0)


def test_the_program_says_why_it_cannot_listen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as thief:
        of = fleet(facts(0), facts(1), wanted=needs(master_port=thief.getsockname()[1]))
        with program(of, 0) as process:
            found = read_listening(line_of(process))
    assert found.master == "address already in use"


def test_a_machine_without_python_says_so() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", SCRIPT, "sh", "", "", "/no/such/python"], capture_output=True, env={"PATH": "/nowhere"}
    )
    assert "python3" in str(read_listening(done.stdout))
