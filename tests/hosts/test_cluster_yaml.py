from dataclasses import replace
from pathlib import Path

import pytest

from tests.hosts.machines import MACHINES, cluster, recorded
from topoplan.errors import SpecError
from topoplan.hosts.cluster_yaml import MARK, cluster_spec, is_edited
from topoplan.hosts.probe import Probed
from topoplan.specs.cluster import Cluster, Host
from topoplan.specs.load import load_cluster

GIB = 2**30
NO_CLUSTER = ("a100-mig",)
NOT_IN_CATALOG = ("rtx5090-pcie", "titan-old-driver")


def loaded(hosts: list[Probed], tmp_path: Path) -> Cluster:
    text = cluster_spec(hosts).text
    (tmp_path / "cluster.yaml").write_text(text)
    return load_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize("machine", [name for name in MACHINES if name not in (*NO_CLUSTER, *NOT_IN_CATALOG)])
def test_two_of_each_machine_make_a_spec_that_loads(machine: str, tmp_path: Path) -> None:
    hosts = cluster(machine, machine)
    found = loaded(hosts, tmp_path)
    assert (found.nodes, found.gpus_per_node) == (2, len(hosts[0].facts.gpus or ()))
    assert [host.address for host in found.hosts] == ["node0", "node1"]
    assert {host.socket_interface for host in found.hosts} == {"bond0"}
    draft = cluster_spec(hosts)
    assert draft.is_complete
    assert (draft.text or "").startswith(MARK)


def test_a_dgx_h100_is_the_catalogs(tmp_path: Path) -> None:
    found = loaded(cluster("dgx-h100", "dgx-h100"), tmp_path)
    assert found.name == "h100-sxm-80gb-2x8"
    assert found.gpu.name == "h100-sxm-80gb"
    assert (found.nvlink_bytes_per_s, found.nic_bytes_per_s, found.nics_per_node) == (450e9, 50e9, 8)
    assert (found.fabric.kind, found.sockets, found.cpu_cores) == ("infiniband", 2, 112)
    assert found.pcie_bytes_per_s == 63e9
    assert found.host_memory_bytes == pytest.approx(2113453272 * 1024, rel=1e-4)
    assert found.hosts[0].hcas[:2] == ("mlx5_0:1", "mlx5_3:1")


def test_roce_and_sockets_are_told_apart(tmp_path: Path) -> None:
    assert loaded(cluster("hgx-h20", "hgx-h20"), tmp_path).fabric.kind == "roce"
    sockets = loaded(cluster("rtx4090-pcie", "rtx4090-pcie"), tmp_path)
    assert (sockets.fabric.kind, sockets.nic_bytes_per_s, sockets.hosts[0].hcas) == ("ethernet", 25e9 / 8, ())
    assert sockets.nvlink_bytes_per_s == 0


def test_machines_of_clouds_get_what_their_network_needs(tmp_path: Path) -> None:
    """The machines are composed, not recorded: see recorded/README.md."""
    aws = loaded(cluster("aws-p5", "aws-p5"), tmp_path)
    assert (aws.fabric.kind, aws.nics_per_node, aws.nic_bytes_per_s) == ("efa", 32, 100e9 / 8)
    assert aws.hosts[0].hcas == ()
    google = loaded(cluster("gcp-a3-mega", "gcp-a3-mega"), tmp_path)
    assert (google.fabric.kind, google.nics_per_node, google.nic_bytes_per_s) == ("tcpxo", 8, 200e9 / 8)
    azure = loaded(cluster("azure-nd-h100-v5", "azure-nd-h100-v5"), tmp_path)
    assert (azure.fabric.kind, azure.nics_per_node, azure.nic_bytes_per_s) == ("infiniband", 8, 400e9 / 8)
    assert azure.fabric.topology_file == "/opt/microsoft/ndv5-topo.xml"
    mixed = loaded(cluster("azure-nd-h100-v5", "dgx-h100"), tmp_path)
    assert mixed.fabric.topology_file is None


def test_the_traffic_class_of_roce_is_that_which_all_hosts_send_with(tmp_path: Path) -> None:
    def classes(*lines: str) -> int | None:
        texts = [
            recorded("hgx-h20", "adapters.txt")
            + "".join(f"mlx5_bond_{index} 1 traffic_class\t{line}\n" for index in range(9))
            for line in lines
        ]
        hosts = cluster("hgx-h20", "hgx-h20", changes={i: {"adapters": text} for i, text in enumerate(texts)})
        return loaded(hosts, tmp_path).fabric.traffic_class

    assert classes("Global tclass=106", "Global tclass=106") == 106
    assert classes("Global tclass=106", "Global tclass=96") is None
    assert classes("", "Global tclass=106") is None


def test_what_was_left_out_stands_in_comments() -> None:
    text = cluster_spec(cluster("dgx-h100", "dgx-h100")).text or ""
    assert "# not used: mlx5_1, mlx5_7 (NODE to every GPU)" in text
    assert "# model: Qwen/Qwen3-8B" in text


@pytest.mark.parametrize("machine", NOT_IN_CATALOG)
def test_a_card_that_nobody_knows_has_to_be_filled_in(machine: str, tmp_path: Path) -> None:
    draft = cluster_spec(cluster(machine, machine))
    assert not draft.is_complete
    assert [check.name for check in draft.findings] == ["gpu-figures"]
    path = tmp_path / "cluster.yaml"
    path.write_text(draft.text or "")
    with pytest.raises(SpecError, match="missing in `gpu`"):
        load_cluster(path)
    assert "nvlink_bandwidth: none" in (draft.text or "")
    path.write_text((draft.text or "").replace("# memory_b", "memory_b").replace("# bf16", "bf16"))
    assert load_cluster(path).gpu.bf16_flops == 989e12


def test_memory_that_is_not_the_usual_one_is_written_down(tmp_path: Path) -> None:
    ecc = recorded("rtx4090-pcie", "gpus.csv").replace("24564 MiB", "23028 MiB")
    found = loaded(cluster("rtx4090-pcie", "rtx4090-pcie", changes={0: {"gpus": ecc}, 1: {"gpus": ecc}}), tmp_path)
    assert (found.gpu.name, found.gpu.memory_bytes) == ("rtx4090-24gb", 23028 * 2**20)


def test_a_card_with_twice_the_memory_is_another_card() -> None:
    twice = recorded("rtx4090-pcie", "gpus.csv").replace("24564 MiB", "49140 MiB")
    draft = cluster_spec(cluster("rtx4090-pcie", "rtx4090-pcie", changes={0: {"gpus": twice}, 1: {"gpus": twice}}))
    assert not draft.is_complete


def test_hosts_that_differ_get_what_all_have(tmp_path: Path) -> None:
    fewer = "\n".join(recorded("dgx-h100", "gpus.csv").splitlines()[:-1]) + "\n"
    ports = recorded("dgx-h100", "adapters.txt").replace("mlx5_11 1 state\t4: ACTIVE", "mlx5_11 1 state\t1: DOWN")
    changes = {1: {"gpus": fewer, "adapters": ports, "meminfo": "MemTotal: 1048576000 kB\n"}}
    found = loaded(cluster("dgx-h100", "dgx-h100", changes=changes), tmp_path)
    assert (found.gpus_per_node, found.nics_per_node) == (7, 7)
    assert found.host_memory_bytes == 1000 * GIB
    assert (len(found.hosts[0].hcas), len(found.hosts[1].hcas)) == (8, 7)


def test_a_network_that_only_some_hosts_have_is_not_used(tmp_path: Path) -> None:
    found = loaded(cluster("dgx-h100", "dgx-h100", changes={1: {"adapters": ""}}), tmp_path)
    assert (found.fabric.kind, found.nics_per_node, found.nic_bytes_per_s) == ("ethernet", 1, 25e9 / 8)
    assert found.hosts[0].hcas == ()


def test_nvlink_that_is_not_whole_is_a_finding() -> None:
    draft = cluster_spec(cluster("b200-broken-nvlink", "b200-broken-nvlink"))
    assert [check.name for check in draft.findings] == ["nvlink"]
    assert "a GPU here has no link up, not every pair of GPUs is joined by it" in draft.findings[0].what
    assert "nvlink_bandwidth: none" in (draft.text or "")
    assert "a GPU has no link up" in (draft.text or "")


def test_a_driver_that_lists_no_links_leaves_them_to_the_catalog(tmp_path: Path) -> None:
    hosts = cluster("dgx-h100", "dgx-h100", changes={0: {"nvlink": ""}, 1: {"nvlink": ""}})
    assert loaded(hosts, tmp_path).nvlink_bytes_per_s == 450e9


def test_bridges_between_pairs_are_not_nvlink_of_a_machine(tmp_path: Path) -> None:
    links = "GPU 0: NVIDIA L40S (UUID: GPU-0)\n\t Link 0: 25 GB/s\n"
    hosts = cluster("l40s-pcie", "l40s-pcie", changes={0: {"nvlink": links}, 1: {"nvlink": links}})
    assert loaded(hosts, tmp_path).nvlink_bytes_per_s == 0
    assert "bridges join some pairs" in (cluster_spec(hosts).text or "")


def test_an_unknown_speed_is_assumed_and_said() -> None:
    changes = {0: {"speeds": "bond0\t-1\n"}, 1: {"speeds": ""}}
    draft = cluster_spec(cluster("rtx4090-pcie", "rtx4090-pcie", changes=changes))
    assert [check.name for check in draft.findings] == ["network-rate"]
    assert "ib_bandwidth: 10Gb/s" in (draft.text or "")
    assert "ASSUMED" in (draft.text or "")


def test_the_limit_of_a_container_is_its_memory(tmp_path: Path) -> None:
    limit = {"cgroup": f"limit\t{512 * GIB}\n"}
    hosts = cluster("dgx-h100", "dgx-h100", changes={0: limit, 1: limit})
    assert loaded(hosts, tmp_path).host_memory_bytes == 512 * GIB


@pytest.mark.parametrize(
    ("machines", "changes", "name"),
    [
        (("a100-mig", "a100-mig"), {}, "mig"),
        (("dgx-h100", "hgx-h20"), {}, "gpu-kind"),
        (("dgx-h100", "dgx-h100"), {1: {"gpus": "No devices were found\n"}}, "gpus"),
        (("dgx-h100",), {0: {"gpus": recorded("dgx-h100", "gpus.csv").replace("H100", "H200", 1)}}, "gpu-kind"),
    ],
)
def test_hosts_that_make_no_cluster_give_reasons_and_no_spec(
    machines: tuple[str, ...], changes: dict[int, dict[str, str]], name: str
) -> None:
    draft = cluster_spec(cluster(*machines, changes=changes))
    assert draft.text is None
    assert name in {check.name for check in draft.findings if check.outcome == "failure"}


def test_what_the_user_said_of_hosts_is_kept(tmp_path: Path) -> None:
    (one,) = cluster("dgx-h100")
    own = Host(address="node0", user="alice", port=2200, workdir="/data/my runs", venv="/opt/venv")
    found = loaded([replace(one, host=own)], tmp_path).hosts[0]
    assert (found.user, found.port, found.workdir, found.venv) == ("alice", 2200, "/data/my runs", "/opt/venv")


def test_an_address_in_place_of_an_alias_brings_user_and_port(tmp_path: Path) -> None:
    hosts = cluster("dgx-h100", "dgx-h100")
    hosts = [replace(one, host=Host(address=f"alias{index}"), user="bob", port=2222) for index, one in enumerate(hosts)]
    first = loaded(hosts, tmp_path).hosts[0]
    assert (first.address, first.user, first.port) == ("node0", "bob", 2222)


def test_the_same_facts_give_the_same_text() -> None:
    assert cluster_spec(cluster("dgx-h100", "dgx-h100")) == cluster_spec(cluster("dgx-h100", "dgx-h100"))


def test_a_spec_that_was_filled_in_is_told_from_one_that_was_not() -> None:
    text = cluster_spec(cluster("dgx-h100", "dgx-h100")).text or ""
    assert not is_edited(text)
    assert is_edited(text.replace("# model:", "model:"))
    assert is_edited(MARK + "\n")
    assert not is_edited("name: another\n")
