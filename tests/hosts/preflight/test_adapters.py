from dataclasses import replace
from typing import Any

import pytest

from tests.hosts.fleets import ROUTABLE, adapter, cluster, facts, fleet, outcome, roce, second, see, told
from topoplan.hosts.facts import AdapterFacts
from topoplan.hosts.preflight.adapters import adapters, gid, traffic_class
from topoplan.hosts.preflight.adapters import peermem as module_loaded
from topoplan.hosts.preflight.fleet import Fleet
from topoplan.specs.cluster import Cluster, Fabric

V1 = {0: (ROUTABLE, "IB/RoCE v1")}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((adapter(0), adapter(1)), "ok"),
        ((adapter(0), adapter(1), adapter(2, rate_bytes_per_s=1.25e9)), "ok"),
        ((adapter(0), adapter(1, state="DOWN")), "warning"),
        ((adapter(0, state="DOWN"), adapter(1, state="INIT")), "failure"),
        ((), "failure"),
        ((adapter(0), adapter(1, rate_bytes_per_s=12.5e9)), "warning"),
        ((adapter(0), adapter(1, rate_bytes_per_s=None)), "ok"),
        ((roce(0), roce(1)), "warning"),
        (None, "skipped"),
    ],
)
def test_rdma_adapters(found: tuple[AdapterFacts, ...] | None, expected: str) -> None:
    assert outcome(adapters, second(adapters=found), 1) == expected
    assert outcome(adapters, second(cluster(nodes=3, kind="ethernet"), adapters=found), 1) is None


@pytest.mark.parametrize(
    ("hcas", "expected"),
    [(("mlx5_0:1",), "ok"), (("mlx5_0", "mlx5_1"), "warning"), (("mlx5_7",), "failure"), (("mlx5_1",), "failure")],
)
def test_adapters_that_the_spec_names(hcas: tuple[str, ...], expected: str) -> None:
    down = (adapter(0), adapter(1, state="DOWN"), adapter(10))
    assert outcome(adapters, second(told(hcas=hcas), adapters=down), 1) == expected


@pytest.mark.parametrize(
    ("gids", "env", "nccl", "expected"),
    [
        (None, {}, "2.21.5", "ok"),
        (None, {}, "2.20.5", "warning"),
        (None, {}, "", "ok"),
        (V1, {}, "2.21.5", "failure"),
        (None, {"NCCL_IB_GID_INDEX": "3"}, "2.20.5", "ok"),
        (None, {"NCCL_IB_GID_INDEX": "0"}, "2.21.5", "failure"),
        ({}, {}, "2.21.5", "skipped"),
    ],
)
def test_roce_addresses(gids: Any, env: dict[str, str], nccl: str, expected: str) -> None:
    changes = {} if gids is None else {"gids": gids}
    ports = tuple(replace(roce(index), **changes) for index in range(2))
    versions = {"nccl": nccl} if nccl else {}
    place = cluster(nodes=3, kind="roce", env=env)
    assert outcome(gid, second(place, adapters=ports, versions=versions), 1) == expected


@pytest.mark.parametrize(
    ("peermem", "kernel", "expected"),
    [
        (True, "4.18.0", "ok"),
        (False, "5.15.0-105-generic", "ok"),
        (False, "5.4.0", "warning"),
        (False, "", "warning"),
        (None, "5.4.0", "skipped"),
    ],
)
def test_gpudirect(peermem: bool | None, kernel: str, expected: str) -> None:
    assert outcome(module_loaded, second(peermem=peermem, kernel=kernel), 1) == expected


def roce_scene(*classes: int | None, of: Cluster | None = None, **changes: Any) -> Fleet:
    """Return hosts whose adapters have these traffic classes set."""
    of = of or cluster(nodes=len(classes), kind="roce")
    said = [
        facts(n, adapters=(roce(0, traffic_class=one), roce(1, traffic_class=one)), **changes)
        for n, one in enumerate(classes)
    ]
    return fleet(*said, of=of)


def asking(value: int, nodes: int = 2) -> Cluster:
    return cluster(nodes=nodes, fabric=Fabric(kind="roce", traffic_class=value))


def test_a_traffic_class_that_nobody_names_cannot_be_judged() -> None:
    assert outcome(traffic_class, roce_scene(None, None)) == "skipped"
    assert outcome(traffic_class, fleet()) is None


def test_the_traffic_class_of_spec_or_host_is_told() -> None:
    found = see(traffic_class, roce_scene(None, None, of=asking(106)))
    assert (found.outcome, found.what) == ("ok", "traffic class 106 (DSCP 26)")
    assert outcome(traffic_class, roce_scene(106, 106)) == "ok"
    assert outcome(traffic_class, roce_scene(106, 106, of=asking(106))) == "ok"
    by_env = cluster(kind="roce", env={"NCCL_IB_TC": "106"})
    assert outcome(traffic_class, roce_scene(None, None, of=by_env)) == "ok"


def test_a_host_that_sends_with_another_traffic_class_is_a_warning() -> None:
    found = see(traffic_class, roce_scene(236, 236, of=asking(106)))
    assert (found.outcome, "traffic_class: 236" in found.remedy) == ("warning", True)
    assert outcome(traffic_class, roce_scene(106, 106, 96), 2) == "warning"
    mixed = facts(0, adapters=(roce(0, traffic_class=106), roce(1)))
    assert outcome(traffic_class, fleet(mixed, facts(1), of=cluster(kind="roce"))) == "warning"


def test_adapters_of_efa_are_counted_and_need_no_gpudirect_module() -> None:
    place = cluster(kind="efa")
    efa = tuple(adapter(index, device=f"rdmap{index}s0", link_layer="Unknown") for index in range(2))
    hosts = fleet(*(facts(n, adapters=efa, peermem=False) for n in range(2)), of=place)
    assert outcome(adapters, hosts) == "ok"
    assert outcome(gid, hosts) is None
    assert outcome(module_loaded, hosts) is None
    assert outcome(adapters, fleet(*(facts(n, adapters=efa) for n in range(2)), of=cluster())) == "warning"
