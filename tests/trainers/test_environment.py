from dataclasses import replace
from typing import Any, get_args

import pytest

from tests.bundle.samples import B200, CLUSTER, HOSTS, ONE_NODE, make_spec_and_plan
from topoplan.errors import SpecError
from topoplan.specs.cluster import Fabric, FabricKind
from topoplan.trainers.environment import node_environment
from topoplan.trainers.llamafactory.mca import trainer_file, trainer_run

# NVIDIA's debugging variables and popular cargo-cult settings, which topoplan must never set.
NEVER = {
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_NTHREADS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_NVLS_ENABLE",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "NCCL_LAUNCH_MODE",
    "ALLOW_EXTRA_ARGS",
}


def environment(node: int = 0, **what: Any) -> dict[str, str]:
    spec, plan = make_spec_and_plan(**what)
    variables = node_environment(
        spec.cluster, trainer_run(spec, plan.layout, trainer_file(spec, plan.layout).values).environment, node
    )
    assert all(variable.reason for variable in variables)
    assert len({variable.name for variable in variables}) == len(variables)
    return {variable.name: variable.value for variable in variables}


def test_a_cluster_without_details_gets_the_trainer_s_variables_and_no_network_settings() -> None:
    assert environment() == {
        "USE_MCA": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "RECORD_VRAM": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "4",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_DEBUG": "WARN",
    }


@pytest.mark.parametrize(
    ("what", "is_set"),
    [
        ({"tp": 4}, True),
        ({"tp": 1, "cp": 2}, True),
        ({"tp": 1}, False),
        ({"tp": 1, "pp": 4}, False),
        ({"tp": 4, "cluster": replace(CLUSTER, gpu=B200)}, False),
    ],
)
def test_one_connection_is_for_tp_or_cp_before_blackwell(what: dict[str, Any], is_set: bool) -> None:
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in environment(**what)) is is_set


def test_interface_and_adapters_are_those_of_the_host_exactly() -> None:
    other = replace(HOSTS[1], socket_interface="ens1f0", hcas=("mlx5_2",))
    cluster = replace(CLUSTER, hosts=(HOSTS[0], other, *HOSTS[2:]))
    first, second = environment(0, cluster=cluster), environment(1, cluster=cluster)
    assert first["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert first["GLOO_SOCKET_IFNAME"] == "eth0"
    assert first["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert second["NCCL_SOCKET_IFNAME"] == "=ens1f0"
    assert second["GLOO_SOCKET_IFNAME"] == "ens1f0"
    assert second["NCCL_IB_HCA"] == "=mlx5_2"


def test_one_node_needs_no_network() -> None:
    names = environment(cluster=replace(ONE_NODE, hosts=HOSTS[:1], fabric=Fabric(kind="ethernet")))
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE"} & set(names)


@pytest.mark.parametrize(("kind", "disabled"), [("infiniband", False), ("roce", False), ("ethernet", True)])
def test_rdma_is_switched_off_only_where_the_spec_says_there_is_none(kind: str, disabled: bool) -> None:
    names = environment(cluster=replace(CLUSTER, hosts=HOSTS, fabric=Fabric(kind=kind)))
    assert ("NCCL_IB_DISABLE" in names) is disabled
    assert ("NCCL_IB_HCA" in names) is not disabled


def test_traffic_class_and_service_level_are_the_specs_and_never_made_up() -> None:
    fabric = Fabric(kind="roce", traffic_class=106, service_level=3)
    names = environment(cluster=replace(CLUSTER, hosts=HOSTS, fabric=fabric))
    assert (names["NCCL_IB_TC"], names["NCCL_IB_SL"]) == ("106", "3")
    zero = environment(cluster=replace(CLUSTER, fabric=Fabric(kind="infiniband", traffic_class=0, service_level=0)))
    assert (zero["NCCL_IB_TC"], zero["NCCL_IB_SL"]) == ("0", "0")
    assert not {"NCCL_IB_TC", "NCCL_IB_SL"} & set(environment(cluster=replace(CLUSTER, fabric=Fabric(kind="roce"))))
    spec, _ = make_spec_and_plan(cluster=replace(CLUSTER, fabric=fabric))
    reasons = {variable.name: variable.reason for variable in node_environment(spec.cluster, (), 0)}
    assert "DSCP 26" in reasons["NCCL_IB_TC"]
    assert "lossy" in reasons["NCCL_IB_TC"]


def test_what_verbs_alone_read_is_not_written_for_efa() -> None:
    names = environment(cluster=replace(CLUSTER, hosts=HOSTS, fabric=Fabric(kind="efa")))
    assert not [name for name in names if name.startswith("NCCL_IB_")]
    assert names["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_googles_plugin_gets_names_as_its_profile_has_them() -> None:
    hosts = tuple(replace(host, hcas=("enp6s0", "enp7s0")) for host in HOSTS)
    names = environment(cluster=replace(CLUSTER, hosts=hosts, fabric=Fabric(kind="tcpxo")))
    assert names["NCCL_SOCKET_IFNAME"] == names["NCCL_FASTRAK_CTRL_DEV"] == names["GLOO_SOCKET_IFNAME"] == "eth0"
    assert names["NCCL_FASTRAK_IFNAME"] == "enp6s0,enp7s0"
    assert not [name for name in names if name.startswith("NCCL_IB_")]
    bare = environment(cluster=replace(CLUSTER, fabric=Fabric(kind="tcpxo")))
    assert not [name for name in bare if name.endswith("IFNAME")], "the profile finds them"


def test_nothing_of_the_debugging_list_is_set() -> None:
    for kind in get_args(FabricKind):
        assert not NEVER & set(environment(cluster=replace(CLUSTER, hosts=HOSTS, fabric=Fabric(kind=kind))))


def test_threads_are_a_gpu_s_share_of_the_cores() -> None:
    assert environment(cluster=replace(CLUSTER, cpu_cores=192))["OMP_NUM_THREADS"] == "24"
    assert environment(cluster=replace(CLUSTER, cpu_cores=4))["OMP_NUM_THREADS"] == "1"


def test_the_user_s_variables_come_last_and_win() -> None:
    names = environment(cluster=replace(CLUSTER, env={"NCCL_DEBUG": "INFO", "HF_HOME": "/data/hf"}))
    assert names["NCCL_DEBUG"] == "INFO"
    assert list(names)[-2:] == ["NCCL_DEBUG", "HF_HOME"]


def test_more_adapters_than_nccl_takes_are_refused() -> None:
    cluster = replace(CLUSTER, hosts=(replace(HOSTS[0], hcas=("m",) * 33), *HOSTS[1:]))
    with pytest.raises(SpecError, match=r"hosts\[0\]"):
        environment(cluster=cluster)
