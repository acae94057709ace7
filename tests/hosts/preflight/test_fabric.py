"""Cloud machines, composed from their vendors' documents: see recorded/README.md."""

from dataclasses import replace
from typing import Any

import pytest

from tests.hosts.fleets import cluster, facts, fleet, outcome, path, second, see
from tests.hosts.machines import facts as facts_of
from topoplan.bundle.fabric import fabric_needs
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.preflight import fabric as checks
from topoplan.hosts.preflight.fabric import nccl_settings
from topoplan.hosts.preflight.fleet import Fleet
from topoplan.specs.cluster import Cluster, Fabric

TOPOLOGY = "/opt/microsoft/ndv5-topo.xml"


def of(machine: str, **changes: Any) -> HostFacts:
    return replace(facts_of(machine), **changes)


def hosts(machine: str, place: Cluster, there: tuple[str, ...] = (), **changes: Any) -> Fleet:
    """Return two such machines on which, of all paths that the network needs, these exist."""
    query_times_s = [one for need in fabric_needs(place) for one in need.paths]
    found = {one: path(one, exists=one in there) for one in query_times_s}
    return fleet(*(of(machine, paths=found, **changes) for _ in range(place.nodes)), of=place)


def with_fabric(**keys: Any) -> Cluster:
    return cluster(fabric=Fabric(**keys))


@pytest.mark.parametrize(
    ("machine", "key"),
    [
        ("aws-p5", "fabric: {kind: efa}"),
        ("gcp-a3-mega", "fabric: {kind: tcpxo}"),
        ("azure-nd-h100-v5", f"fabric: {{topology_file: {TOPOLOGY}}}"),
    ],
)
def test_a_machine_that_the_spec_does_not_know_is_a_warning_with_the_key(machine: str, key: str) -> None:
    found = see(checks.cloud, hosts(machine, with_fabric()))
    assert found.outcome == "warning"
    assert f"write {key} in the spec" in found.remedy
    assert outcome(checks.cloud, hosts(machine, cluster(nodes=1))) is None


@pytest.mark.parametrize(
    ("machine", "keys"),
    [
        ("aws-p5", {"kind": "efa"}),
        ("gcp-a3-mega", {"kind": "tcpxo"}),
        ("azure-nd-h100-v5", {"topology_file": "/data/topo.xml"}),
    ],
)
def test_a_spec_that_knows_its_machines_is_fine(machine: str, keys: dict[str, str]) -> None:
    assert outcome(checks.cloud, hosts(machine, with_fabric(**keys))) == "ok"


def test_a_topology_file_that_nccls_own_file_names_is_enough() -> None:
    """As in Azure's HPC images, which have it in /etc/nccl.conf."""
    settings = {"NCCL_TOPO_FILE": "/opt/microsoft/ndv5/topo.xml"}
    assert outcome(checks.cloud, hosts("azure-nd-h100-v5", with_fabric(), nccl_settings=settings)) == "ok"
    by_env = cluster(env={"NCCL_TOPO_FILE": TOPOLOGY})
    assert outcome(checks.cloud, hosts("azure-nd-h100-v5", by_env)) == "ok"


def test_other_machines_are_not_looked_at() -> None:
    assert outcome(checks.cloud, fleet()) is None
    assert outcome(checks.fabric_files, fleet()) is None


def test_a_plugin_in_any_of_its_places_will_do() -> None:
    place = with_fabric(kind="efa")
    for one in ("/opt/amazon/ofi-nccl/lib/libnccl-net.so", "/opt/aws-ofi-nccl/install/lib/libnccl-net.so"):
        assert outcome(checks.fabric_files, hosts("aws-p5", place, (one,))) == "ok"
    found = see(checks.fabric_files, hosts("aws-p5", place))
    assert (found.outcome, "EFA installer" in found.remedy) == ("failure", True)
    settings = {"NCCL_NET_PLUGIN": "mine"}
    assert outcome(checks.fabric_files, hosts("aws-p5", place, nccl_settings=settings)) == "ok"
    assert outcome(checks.fabric_files, fleet(facts(0, paths={}), facts(1, paths={}), of=place)) == "skipped"


def test_tcpxo_wants_profile_devices_and_its_daemon() -> None:
    place = with_fabric(kind="tcpxo")
    both = ("/var/lib/tcpxo/lib64/nccl-env-profile.sh", "/dev/aperture_devices")
    runs = {"daemons": ("fastrak_gpumem_manager",)}
    assert outcome(checks.fabric_files, hosts("gcp-a3-mega", place, both, **runs)) == "ok"
    assert outcome(checks.fabric_files, hosts("gcp-a3-mega", place, both)) == "warning"
    for one in both:
        assert outcome(checks.fabric_files, hosts("gcp-a3-mega", place, (one,), **runs)) == "failure"
    found = see(checks.fabric_files, hosts("gcp-a3-mega", place, **runs))
    assert all(word in found.what for word in ("nccl-env-profile.sh", "aperture devices"))


def test_a_topology_file_that_is_not_there_is_a_failure_that_says_where_to_get_it() -> None:
    found = see(checks.fabric_files, hosts("azure-nd-h100-v5", with_fabric(topology_file=TOPOLOGY)))
    assert found.outcome == "failure"
    assert found.what == f"no topology file at {TOPOLOGY}"
    assert "azhpc-images" in found.remedy
    own = with_fabric(topology_file="/data/topo.xml")
    assert outcome(checks.fabric_files, hosts("azure-nd-h100-v5", own, ("/data/topo.xml",))) == "ok"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "ok"),
        ({"NCCL_IB_TC": "106"}, "warning"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning"),
        ({"NCCL_ALGO": "Ring"}, "warning"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, "ok"),
    ],
)
def test_settings_of_nccl_on_one_host(settings: dict[str, str], expected: str) -> None:
    assert outcome(nccl_settings, second(nccl_settings=settings), 1) == expected


def test_settings_that_all_hosts_have_are_shown() -> None:
    hosts = [facts(number, nccl_settings={"NCCL_IB_TC": "106", "NCCL_P2P_DISABLE": "0"}) for number in range(2)]
    found = see(nccl_settings, fleet(*hosts))
    assert found.outcome == "ok"
    assert "NCCL_IB_TC=106" in found.what


def test_settings_that_the_spec_overrides_do_not_count() -> None:
    place = cluster(nodes=3, env={"NCCL_ALGO": "Tree"})
    assert outcome(nccl_settings, second(place, nccl_settings={"NCCL_ALGO": "Ring"}), 1) == "ok"


def test_settings_of_googles_profile_are_no_left_overs_of_debugging() -> None:
    profile = {"NCCL_PROTO": "Simple,LL128", "NCCL_BUFFSIZE": "8388608", "NCCL_FASTRAK_NUM_FLOWS": "2"}
    said = (facts(0, nccl_settings=profile), facts(1, nccl_settings=profile))
    assert outcome(nccl_settings, fleet(*said, of=cluster(kind="tcpxo"))) == "ok"
    del profile["NCCL_FASTRAK_NUM_FLOWS"]
    assert outcome(nccl_settings, fleet(*said)) == "warning"
