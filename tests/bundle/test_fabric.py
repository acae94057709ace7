"""The network's requirements in node scripts, run by bash with the files in a directory of the test."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, ONE_NODE, make_spec_and_plan
from tests.bundle.shell_scripts import assert_sound
from tests.bundle.test_node_script import cluster_in, start
from topoplan.bundle.bundle import generate
from topoplan.bundle.fabric import fabric_needs, lossless_note
from topoplan.bundle.write import write_bundle
from topoplan.specs import known
from topoplan.specs.cluster import Cluster, Fabric

TOPOLOGY = "/opt/microsoft/ndv5-topo.xml"
PROFILE = """\
: "${NCCL_LIB_DIR:?Must set NCCL_LIB_DIR}"
false
export LD_LIBRARY_PATH="${NCCL_LIB_DIR}:${LD_LIBRARY_PATH}:${NEVER_SET}"
export NCCL_SOCKET_IFNAME=eth7 NCCL_BUFFSIZE=8388608 NCCL_DEBUG=INFO
"""
"""Like Google's script: an unset variable, a failing command, and more settings than topoplan uses."""


def script_in(root: Path, fabric: Fabric, **changes: Any) -> Path:
    """Write a node's script that searches below `root` instead of the root directory."""
    cluster = replace(cluster_in(root), fabric=fabric, **changes)
    write_bundle(generate(*make_spec_and_plan(cluster=cluster)), root / "bundle")
    script = root / "bundle" / "node-01.sh"
    text = script.read_text()
    for top in ("/opt/amazon", "/opt/aws", "/opt/microsoft/", "/var/lib/tcpxo", "/usr/local/", "/dev/aperture"):
        text = text.replace(f" {top}", f" {root}{top}").replace(f"({top}", f"({root}{top}")
    script.write_text(text)
    return script


def put(root: Path, path: str, text: str = "") -> Path:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


@pytest.mark.parametrize(
    ("library", "plugin"),
    [
        ("/opt/amazon/ofi-nccl/lib/libnccl-net.so", None),
        ("/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so", None),
        ("/opt/amazon/aws-ofi-nccl/lib/libnccl-net-aws-ofi.so", "aws-ofi"),
        ("/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", "ofi"),
    ],
)
def test_the_loader_is_told_where_the_plugin_of_efa_is(tmp_path: Path, library: str, plugin: str | None) -> None:
    script = script_in(tmp_path, Fabric(kind="efa"))
    found = put(tmp_path, library)
    started = start(script, tmp_path / "probe", env={"LD_LIBRARY_PATH": "/mine"})
    assert started.code == 0, started.stderr
    assert started.env["LD_LIBRARY_PATH"] == f"{found.parent}:/mine"
    assert started.env.get("NCCL_NET_PLUGIN") == plugin


def test_without_the_plugin_the_script_stops_with_one_line_unless_another_is_named(tmp_path: Path) -> None:
    script = script_in(tmp_path, Fabric(kind="efa"))
    stopped = start(script, tmp_path / "probe")
    assert stopped.code == 2
    assert stopped.stderr.startswith("node-01.sh: no NCCL plugin for EFA")
    assert stopped.stderr.count("\n") == 1
    assert start(script, tmp_path / "probe", env={"NCCL_NET_PLUGIN": "mine"}).code == 0


def test_a_vendors_profile_is_read_first_and_the_spec_wins(tmp_path: Path) -> None:
    script = script_in(tmp_path, Fabric(kind="tcpxo"), env={"NCCL_BUFFSIZE": "4194304"})
    assert "no nccl-env-profile.sh" in start(script, tmp_path / "probe").stderr
    profile = put(tmp_path, "/var/lib/tcpxo/lib64/nccl-env-profile.sh", PROFILE)
    assert "no aperture devices" in start(script, tmp_path / "probe").stderr
    devices = put(tmp_path, "/dev/aperture_devices/0000:06:00.1").parent
    started = start(script, tmp_path / "probe")
    assert started.code == 0, started.stderr
    assert str(profile.parent) in started.env["LD_LIBRARY_PATH"].split(":")
    assert started.env["NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"] == str(devices)
    assert started.env["NCCL_SOCKET_IFNAME"] == "eth0", "as the spec has it, not the profile"
    assert started.env["NCCL_DEBUG"] == "WARN"
    assert started.env["NCCL_BUFFSIZE"] == "4194304"


def test_a_topology_file_is_exported_where_it_is_there(tmp_path: Path) -> None:
    script = script_in(tmp_path, Fabric(topology_file=TOPOLOGY))
    stopped = start(script, tmp_path / "probe")
    assert stopped.code == 2
    assert "azhpc-images" in stopped.stderr
    found = put(tmp_path, TOPOLOGY)
    assert start(script, tmp_path / "probe").env["NCCL_TOPO_FILE"] == str(found)


def needed(**changes: Any) -> list[str]:
    return [path for need in fabric_needs(replace(CLUSTER, **changes)) for path in need.paths]


def test_paths_in_env_take_the_place_of_the_usual_ones() -> None:
    assert needed(env={"NCCL_TOPO_FILE": "/my/topo.xml"}, fabric=Fabric(topology_file=TOPOLOGY)) == ["/my/topo.xml"]
    assert needed(fabric=Fabric(kind="efa"), env={"NCCL_NET_PLUGIN": "/my/libnccl-net.so"}) == []
    own = needed(fabric=Fabric(kind="tcpxo"), env={"NCCL_LIB_DIR": "/my/lib64"})
    assert own == ["/my/lib64/nccl-env-profile.sh", "/dev/aperture_devices"]


def test_infiniband_and_one_node_need_nothing() -> None:
    assert needed() == []
    assert fabric_needs(replace(ONE_NODE, fabric=Fabric(kind="efa", topology_file=TOPOLOGY))) == ()


@pytest.mark.parametrize("kind", ["infiniband", "roce", "efa", "tcpxo", "ethernet"])
def test_the_readme_says_what_the_network_needs(kind: Any) -> None:
    cluster = replace(CLUSTER, fabric=Fabric(kind=kind, topology_file=TOPOLOGY))
    files = generate(*make_spec_and_plan(cluster=cluster))
    for number, need in enumerate(fabric_needs(cluster), start=6):
        assert f"\n{number}. {need.what}.\n" in files["README.md"]
    assert TOPOLOGY in files["README.md"]
    assert ("needs a lossless queue" in files["README.md"]) == (kind == "roce")


@pytest.mark.parametrize(
    "quiet",
    [
        {"fabric": Fabric(kind="roce", traffic_class=0)},
        {"fabric": Fabric(kind="roce"), "env": {"NCCL_IB_TC": "106"}},
        {"fabric": Fabric(kind="infiniband")},
    ],
)
def test_a_queue_that_drops_nothing_is_asked_for_where_nobody_has_named_one(quiet: dict[str, Any]) -> None:
    def note(**changes: Any) -> str:
        cluster: Cluster = replace(CLUSTER, **changes)
        return lossless_note(cluster)

    assert "`traffic_class` under `fabric`" in note(fabric=Fabric(kind="roce"))
    assert note(**quiet) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "set `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` under `env`."),
        ({"env": {"NCCL_SOCKET_IFNAME": "eth1"}}, "set `GLOO_SOCKET_IFNAME` under `env`."),
        ({"env": {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}}, None),
        ({"hosts": HOSTS}, None),
        ({"fabric": Fabric(kind="infiniband")}, None),
    ],
)
def test_the_interface_of_an_ethernet_network_is_asked_for(changes: dict[str, Any], said: str | None) -> None:
    assert all(host.socket_interface for host in HOSTS)
    cluster = replace(CLUSTER, **{"fabric": Fabric(kind="ethernet"), **changes})
    readme = generate(*make_spec_and_plan(cluster=cluster))["README.md"]
    assert ("names no network interface" in readme) == (said is not None)
    assert said is None or said in readme


@pytest.mark.parametrize(
    ("gpu", "changes", "lacking"),
    [
        ("rtx4090", {"fabric": Fabric(kind="ethernet")}, "`NCCL_P2P_DISABLE: '1'`"),
        ("rtx4090", {"fabric": Fabric(kind="roce")}, "`NCCL_IB_DISABLE: '0'` and `NCCL_P2P_DISABLE: '1'`"),
        ("rtx4090", {"fabric": Fabric(kind="ethernet"), "env": {"NCCL_P2P_DISABLE": "1"}}, None),
        ("a6000", {"fabric": Fabric(kind="ethernet")}, None),
    ],
)
def test_the_readme_asks_for_the_driver_that_accelerate_does(
    gpu: str, changes: dict[str, Any], lacking: str | None
) -> None:
    files = generate(*make_spec_and_plan(cluster=replace(CLUSTER, gpu=known.gpu(gpu), **changes)))
    assert ("driver 550.40.07 or newer" in files["README.md"]) == (lacking is not None)
    assert lacking is None or f"unless the spec has {lacking} under `env`." in files["README.md"]
    # With a newer driver, the cards reach each other.
    assert ("NCCL_P2P_DISABLE" in files["node-00.sh"]) == ("env" in changes)


@pytest.mark.parametrize("kind", ["efa", "tcpxo"])
def test_every_script_passes_bash_and_shellcheck(kind: Any) -> None:
    hosts = tuple(replace(host, hcas=()) for host in HOSTS)
    cluster = replace(CLUSTER, hosts=hosts, fabric=Fabric(kind=kind, topology_file="/opt/it's here/$x.xml"))
    assert_sound(generate(*make_spec_and_plan(cluster=cluster))["node-00.sh"])
