import json
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bed.bed import Bed, probe
from tests.bed.ready_hosts import NAMES, ready_hosts, spec_of, wanted
from tests.cli.conftest import Cli, cli
from tests.waiting import LIMIT_S, eventually
from topoplan.errors import HostError
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.needs import RunNeeds
from topoplan.hosts.preflight.checks import CHECKS, MASTER_REACHABLE, PORTS_OPEN, fleet_of
from topoplan.hosts.preflight.connections import SCRIPT, arguments
from topoplan.hosts.preflight.preflight import preflight
from topoplan.hosts.result import Result
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all
from topoplan.remote.identities import Access
from topoplan.specs.cluster import Cluster

__all__ = ["cli"]

Run = tuple[Cluster, RunNeeds]
Open = Mapping[str, Connection]

LISTEN = "import socket, sys; s = socket.create_server(('0.0.0.0', {port})); print('up', flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ready")


@pytest.fixture(scope="module")
def ready(directory: Path) -> Iterator[Bed]:
    if probe()[0] != "namespaces":
        # Hosts on loopback addresses share their interfaces and ports.
        pytest.skip(f"no network namespaces here: {probe()[1]}")
    with ready_hosts(directory) as bed:
        yield bed


@pytest.fixture(scope="module")
def run(ready: Bed, directory: Path) -> Run:
    spec = spec_of(ready, directory)
    return spec.cluster, wanted(spec)


@pytest.fixture(scope="module")
def connections(ready: Bed) -> Iterator[Open]:
    made = connect_all({name: ready.target(name) for name in NAMES}, Access(), deadline_s=LIMIT_S)
    good = {name: one for name, one in made.items() if isinstance(one, Connection)}
    assert len(good) == len(NAMES), made
    yield good
    for one in good.values():
        one.close()


def found(checks: tuple[Result, ...], *outcomes: str) -> set[tuple[str, str]]:
    return {(check.name, check.host) for check in checks if check.outcome in outcomes}


def one(checks: tuple[Result, ...], name: str, host: str) -> Result:
    (check,) = (check for check in checks if (check.name, check.host) == (name, host))
    return check


def listeners(bed: Bed) -> list[str]:
    """Return the programs of the second stage that are still running."""
    return [line for name in NAMES for line in bed.processes(name).values() if "topoplan preflight of" in line]


def test_hosts_that_are_ready_pass(ready: Bed, run: Run, connections: Open) -> None:
    checks = preflight(connections, *run)
    assert found(checks, "failure", "skipped") == set(), [check for check in checks if check.outcome != "ok"]
    asked = {check.name for check in checks}
    rdma = {"memlock", "rdma-adapters", "roce-gid", "roce-traffic-class", "gpudirect"}
    of_others = {*rdma, "fabric-files", "gpu-peer-access"}  # networks with files of their own, consumer cards
    of_this_machine = {"cloud"}  # where the tests run
    assert asked | of_this_machine == {"reachable", *CHECKS, MASTER_REACHABLE, PORTS_OPEN} - of_others
    assert listeners(ready) == []


def test_a_taken_port_is_found_on_node_0(ready: Bed, run: Run, connections: Open) -> None:
    cluster, needs = run
    program = LISTEN.format(port=needs.master_port)
    thief = connections["n0"].start(["python3", "-c", program], hold_stdin=True)
    try:
        assert next(iter(thief.read(LIMIT_S)))
        checks = preflight(connections, cluster, needs)
    finally:
        thief.close()
    assert found(checks, "failure") == {("master-port-free", "n0"), ("master-port", "n0")}
    assert f"port {needs.master_port}" in one(checks, "master-port-free", "n0").what
    assert "in use" in one(checks, "master-port", "n0").what
    assert one(checks, "master-port", "n2").outcome == "skipped"


def test_two_hosts_that_cannot_talk_are_both_named(ready: Bed, run: Run, connections: Open) -> None:
    with ready.partition("n1", "n3"):
        checks = preflight(connections, *run)
    assert found(checks, "failure") == {("high-ports", "n1"), ("high-ports", "n3")}
    assert "no connection to n3" in one(checks, "high-ports", "n1").what
    assert "timed out" in one(checks, "high-ports", "n1").what
    assert "no connection to n1" in one(checks, "high-ports", "n3").what
    assert listeners(ready) == []


def test_each_fault_is_found_where_it_is(ready: Bed, directory: Path, run: Run, connections: Open) -> None:
    cluster, needs = run
    hosts = list(cluster.hosts)
    hosts[1] = replace(hosts[1], venv="/no/such/venv")
    model = "work/models/Qwen/Qwen3-0.6B"
    there = directory / "n2" / model
    gone = there.with_name("gone")
    there.rename(gone)
    config = directory / "n3" / model / "config.json"
    config.write_text('{"model_type": "qwen2"}')
    down = connect_all({"n0": ready.target("n0", port=9)}, Access(), deadline_s=LIMIT_S)
    try:
        checks = preflight({**connections, **down}, replace(cluster, hosts=tuple(hosts)), needs)
    finally:
        gone.rename(there)
        shutil.copy(there / "config.json", config)
    assert found(checks, "failure") == {
        ("reachable", "n0"),
        ("python", "n1"),
        ("model", "n2"),
        ("model", "n3"),
    }
    assert "/no/such/venv/bin/python" in one(checks, "python", "n1").what
    assert one(checks, "model", "n2").what == f"no {there}"
    assert "other files than on n1" in one(checks, "model", "n3").what
    assert one(checks, "master-port", "n1").what == "nothing listens on node 0"
    assert one(checks, "high-ports", "n1").outcome == "ok", "another Python tries it"


def test_a_host_that_is_lost_in_between_fails(ready: Bed, run: Run, connections: Open) -> None:
    other = connect_all({"n2": ready.target("n2")}, Access())["n2"]
    other.close()
    checks = preflight({**connections, "n2": other}, *run)
    assert one(checks, "reachable", "n2").outcome == "failure"
    assert one(checks, "reachable", "n1").outcome == "ok"


def test_listeners_end_with_the_client(ready: Bed, run: Run, connections: Open) -> None:
    cluster, needs = run
    said: dict[str, HostFacts | HostError] = dict.fromkeys(NAMES, HostFacts())
    fleet = fleet_of(cluster, needs, said)
    stream = connections["n1"].start(SCRIPT, *arguments(fleet, fleet.nodes[1], random.Random(1)), hold_stdin=True)
    assert next(iter(stream.read(LIMIT_S)))
    assert len(listeners(ready)) == 1
    stream.close()
    assert eventually(lambda: not listeners(ready))


def test_a_check_that_is_skipped_is_not_made(run: Run, connections: Open) -> None:
    skip = ("shm", "reachable", MASTER_REACHABLE, PORTS_OPEN)
    names = {check.name for check in preflight(connections, *run, skip=skip)}
    assert not names & set(skip)
    assert "gpus" in names


@pytest.mark.usefixtures("run")
def test_the_verb_says_who_is_ready(
    cli: Cli, ready: Bed, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(ready.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    spec, bundle, data = directory / "cluster.yaml", tmp_path / "bundle", directory / "n2/work/data/dataset_info.json"
    result = cli("preflight", spec)
    assert (result.code, result.err) == (0, ""), result.out
    assert "4 hosts: ready." in result.out
    made = cli("generate", spec, "--pin", "tp=2,pp=1,micro_batch_size=1", "-o", bundle)
    assert made.code == 0, made.err
    text = data.read_text()
    data.unlink()
    try:
        result = cli("preflight", bundle, "--json")
        assert cli("preflight", bundle / "plan.json", "--skip", "data").code == 0
    finally:
        data.write_text(text)
    document = json.loads(result.out)
    failed = [(one["name"], one["host"]) for one in document["checks"] if one["outcome"] == "failure"]
    assert failed == [("data", document["hosts"][2])]
    assert (result.code, len(document["hosts"])) == (1, len(NAMES))
