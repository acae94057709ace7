"""Measurements on real sshd hosts, with CPUs instead of GPUs."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.samples import make_spec
from tests.waiting import LIMIT_S, eventually
from topoplan.errors import HostError
from topoplan.hosts.measure import groups_of, measure
from topoplan.planner.measures import measures_of
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.specs.cluster import Cluster, Host

pytest.importorskip("torch")


@pytest.fixture
def two(four: Bed) -> Iterator[tuple[dict[str, Connection], Cluster]]:
    """Two hosts with two ranks each."""
    targets = {name: four.target(name) for name in ("one", "two")}
    venv = str(Path(sys.prefix))
    hosts = tuple(Host(address=target.hostname, venv=venv) for target in targets.values())
    cluster = replace(make_spec().cluster, nodes=2, gpus_per_node=2, hosts=hosts, env={"OMP_NUM_THREADS": "1"})
    connections = {name: connect(target, Access(), deadline_s=LIMIT_S) for name, target in targets.items()}
    yield connections, cluster
    for connection in connections.values():
        connection.close()


def jobs(bed: Bed) -> Mapping[str, list[str]]:
    found = {
        name: [one for one in bed.processes(name).values() if "measure" in one or "torch" in one]
        for name in ("one", "two")
    }
    return {name: lines for name, lines in found.items() if lines}


def wait_for_none(bed: Bed) -> None:
    eventually(lambda: not jobs(bed))
    assert jobs(bed) == {}


def test_kernels_and_collectives_of_all_groups_are_timed(two: tuple[dict[str, Connection], Cluster], four: Bed) -> None:
    connections, cluster = two
    seen: list[tuple[int, int]] = []
    about, rows = measure(
        connections, cluster, on_cpu=True, limit_s=5 * LIMIT_S, on_progress=lambda *done: seen.append(done)
    )
    measured = measures_of(about, rows, "here")
    assert (about["gpus"], about["nodes"], about["gpu"]) == (2, 2, "")
    groups = {(one.facts["size"], one.facts["stride"]) for one in measured.rows if "stride" in one.facts}
    assert groups == set(groups_of(cluster)) == {(2, 1), (2, 2), (4, 1)}
    kinds = {"matmul", "attention", "attention with gradients", "copy", "all-reduce", "all-gather", "all-to-all"}
    assert {one.kind for one in measured.rows} == kinds
    assert seen[-1] == (len(measured.rows), len(measured.rows))
    assert all(0.0 < one.seconds <= one.slowest_s < LIMIT_S for one in measured.rows)
    wait_for_none(four)


def test_a_host_without_torch_says_so(two: tuple[dict[str, Connection], Cluster], four: Bed) -> None:
    connections, cluster = two
    bare = replace(cluster, hosts=(replace(cluster.hosts[0], venv="/usr"), cluster.hosts[1]))
    with pytest.raises(HostError, match=r"no torch in|exit code") as caught:
        measure(connections, replace(bare, hosts=(replace(bare.hosts[0], venv=None), bare.hosts[1])), on_cpu=True)
    assert caught.value.host == connections["one"].name
    wait_for_none(four)


def test_nothing_is_left_where_a_connection_is_lost(two: tuple[dict[str, Connection], Cluster], four: Bed) -> None:
    connections, cluster = two
    with pytest.raises(HostError):
        measure(
            connections, cluster, on_cpu=True, limit_s=5 * LIMIT_S, on_progress=lambda *done: connections["two"].close()
        )
    wait_for_none(four)
