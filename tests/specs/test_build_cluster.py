from typing import Any

import pytest

from tests.specs.documents import BOX, refusal, spec_of
from topoplan.specs import known
from topoplan.specs.cluster import MOST_GPUS, Cluster

OWN_GPU = {"name": "x200", "memory": "96GiB", "bf16_tflops": 500, "memory_bandwidth": "4TB/s"}
H100, RACK, A4090 = "h100-sxm-80gb", "gb200-nvl72-186gb", "rtx4090-24gb"
NICS = {"nics_per_node": 8}


def cluster(**keys: Any) -> Cluster:
    return spec_of(keys).cluster


class TestTheShortForm:
    def test_takes_every_link_of_the_usual_machine(self) -> None:
        gpu, found = known.gpu(H100), cluster(gpu="H100-SXM-80GB", nodes=4, gpus_per_node=8)
        assert found.nvlink_bytes_per_s == gpu.nvlink_bytes_per_s == 450e9
        assert (found.nvlink_domain_gpus, found.nics_per_node, found.nic_bytes_per_s) == (8, 8, 50e9)
        assert found.pcie_bytes_per_s == gpu.pcie_bytes_per_s
        assert (found.world_size, found.name, found.gpu.name) == (32, "h100-sxm-80gb-4x8", H100)

    def test_is_enough_with_the_gpu_alone(self) -> None:
        found = cluster(gpu="h200-sxm-141gb")
        assert (found.nodes, found.gpus_per_node) == (1, 8)

    @pytest.mark.parametrize("gpus", [1, 2, 4, 7, 8])
    def test_has_one_nic_a_gpu_in_smaller_boxes(self, gpus: int) -> None:
        found = cluster(gpu=H100, nodes=2, gpus_per_node=gpus)
        assert found.nics_per_node == found.nvlink_domain_gpus == gpus

    @pytest.mark.parametrize(("nodes", "domain"), [(18, 72), (36, 72), (2, 8)])
    def test_of_a_rack_spans_nodes_up_to_its_72_gpus(self, nodes: int, domain: int) -> None:
        assert cluster(gpu=RACK, nodes=nodes, gpus_per_node=4).nvlink_domain_gpus == domain

    def test_of_a_pcie_card_has_no_nvlink(self) -> None:
        found = cluster(gpu="a100-pcie-80gb", nodes=2, gpus_per_node=8)
        assert (found.nvlink_bytes_per_s, found.nvlink_domain_gpus) == (0.0, 1)


class TestTheWholeForm:
    def test_halves_nvlink_and_keeps_the_network_as_quoted(self) -> None:
        found = cluster(**BOX, nics_per_node=4)
        assert (found.nvlink_bytes_per_s, found.nics_per_node, found.nic_bytes_per_s) == (450e9, 4, 50e9)

    def test_without_nvlink_is_a_pcie_machine(self) -> None:
        found = cluster(gpu=H100, nodes=2, gpus_per_node=8, ib_bandwidth="400Gb/s", nvlink_bandwidth="none")
        assert (found.nvlink_bytes_per_s, found.nvlink_domain_gpus) == (0.0, 1)
        assert "nvlink_bandwidth" not in found.assumed

    @pytest.mark.parametrize(
        ("given", "assumed"),
        [
            ({"nics_per_node": 8, "ib_bandwidth": "200Gb/s"}, ("gpus_per_node", "nvlink_bandwidth")),
            ({"nvlink_bandwidth": "900GB/s"}, ("gpus_per_node", "ib_bandwidth", "nics_per_node")),
            ({"gpus_per_node": 4}, ("nvlink_bandwidth", "ib_bandwidth", "nics_per_node")),
            ({}, ("gpus_per_node", "nvlink_bandwidth", "ib_bandwidth", "nics_per_node")),
        ],
    )
    def test_what_is_left_out_is_that_of_the_usual_machine(
        self, given: dict[str, object], assumed: tuple[str, ...]
    ) -> None:
        usual = {"gpus_per_node": 8, "nvlink_bandwidth": "900GB/s", "ib_bandwidth": "400Gb/s"}
        found, whole = cluster(gpu=H100, nodes=2, **given), cluster(gpu=H100, nodes=2, **{**usual, **given})
        assert found.assumed == assumed
        for name in ("gpus_per_node", "nvlink_bytes_per_s", "nvlink_domain_gpus", "nic_bytes_per_s", "nics_per_node"):
            assert getattr(found, name) == getattr(whole, name), name

    def test_a_short_name_of_the_card_is_an_assumption(self) -> None:
        found = cluster(gpu="h100", nodes=1, gpus_per_node=1)
        assert (found.gpu.name, found.assumed) == (H100, ("gpu",))

    def test_links_that_nothing_crosses_are_not_assumed(self) -> None:
        assert cluster(gpu=H100, nodes=1, gpus_per_node=8).assumed == ("nvlink_bandwidth",)
        assert cluster(gpu=H100, nodes=1, gpus_per_node=1).assumed == ()

    @pytest.mark.parametrize("rate", ["112.5GB/s", "112.5 Gbytes/s"])
    def test_takes_a_slow_nvlink_when_it_is_in_bytes(self, rate: str) -> None:
        assert cluster(**{**BOX, "nvlink_bandwidth": rate}).nvlink_bytes_per_s == 56.25e9

    def test_takes_seven_gpus_a_node(self) -> None:
        assert cluster(**{**BOX, "gpus_per_node": 7}).world_size == 28

    def test_takes_as_many_gpus_as_the_largest_cluster_has(self) -> None:
        assert cluster(**{**BOX, "nodes": 16_384}).world_size == MOST_GPUS
        assert cluster(**{**BOX, "nodes": MOST_GPUS, "gpus_per_node": 1}).world_size == MOST_GPUS
        message = refusal({**BOX, "nodes": 16_385})
        assert message == "nodes: 16385 * gpus_per_node 8 = 131080 GPUs; expected at most 131072"

    def test_passes_the_optional_keys_on(self) -> None:
        found = cluster(
            **BOX, host_memory="2TB", cpu_cores=96, margin="5%", env={"A": 1}, pcie_bandwidth="50GB/s", name="n"
        )
        assert (found.host_memory_bytes, found.cpu_cores, found.margin) == (2 * 10**12, 96, 0.05)
        assert (found.env, found.pcie_bytes_per_s, found.name) == ({"A": "1"}, 50e9, "n")


class TestAGpuBlock:
    def test_describes_a_card_of_ones_own(self) -> None:
        gpu = cluster(**{**BOX, "gpu": OWN_GPU}).gpu
        assert (gpu.name, gpu.memory_bytes, gpu.bf16_flops, gpu.fp16_flops) == ("x200", 96 * 2**30, 500e12, 500e12)
        assert (gpu.architecture, gpu.fp8_flops, gpu.memory_bytes_per_s) == ("ampere", None, 4e12)

    @pytest.mark.parametrize(
        ("key", "value", "architecture"),
        [("fp8_tflops", 1000, "hopper"), ("fp4_tflops", 2000, "blackwell"), ("architecture", "ada", "ada")],
    )
    def test_tells_its_generation_by_its_precisions(self, key: str, value: object, architecture: str) -> None:
        assert cluster(**{**BOX, "gpu": {**OWN_GPU, key: value}}).gpu.architecture == architecture

    def test_of_a_catalog_name_changes_what_it_gives(self) -> None:
        gpu = cluster(**{**BOX, "gpu": {"name": H100, "memory": "95GiB"}}).gpu
        assert (gpu.memory_bytes, gpu.bf16_flops) == (95 * 2**30, known.gpu(H100).bf16_flops)

    @pytest.mark.parametrize("key", ["memory", "bf16_tflops", "memory_bandwidth"])
    def test_says_which_figure_is_missing(self, key: str) -> None:
        block = {name: value for name, value in OWN_GPU.items() if name != key}
        assert refusal({**BOX, "gpu": block}).startswith(f"`{key}` is missing in `gpu`: 'x200' is not in the catalog")

    def test_has_no_usual_machine(self) -> None:
        assert "`gpus_per_node` is missing" in refusal({"gpu": OWN_GPU, "nodes": 4})
        keys = {"gpu": OWN_GPU, "nodes": 4, "gpus_per_node": 8}
        assert "`nvlink_bandwidth` is missing" in refusal(keys)
        assert "`ib_bandwidth` is missing" in refusal({**keys, "nvlink_bandwidth": "none"})
        assert cluster(**{**keys, "nodes": 1}, nvlink_bandwidth="none").nvlink_bytes_per_s == 0.0
        assert cluster(**{**keys, "nodes": 1, "gpus_per_node": 1}).assumed == ()


class TestTheFabric:
    def test_has_the_defaults_of_rdma(self) -> None:
        fabric = cluster(**BOX).fabric
        assert (fabric.kind, fabric.latency_s, fabric.oversubscription) == ("infiniband", 5e-6, 1.0)

    def test_of_plain_ethernet_is_slower_to_answer(self) -> None:
        assert cluster(**BOX, fabric={"kind": "ethernet"}).fabric.latency_s == 30e-6
        assert cluster(**BOX, fabric={"kind": "ethernet", "latency": "20us"}).fabric.latency_s == 20e-6

    @pytest.mark.parametrize(
        ("fabric", "ratio"),
        [
            ({"nodes_per_leaf": 4, "uplinks_per_leaf": 16}, 2.0),
            ({"nodes_per_leaf": 4, "uplinks_per_leaf": 64}, 1.0),
            ({"nodes_per_leaf": 4, "uplinks_per_leaf": 1, "rails": 8}, 4.0),
            ({"nodes_per_leaf": 8, "uplinks_per_leaf": 0}, 1.0),
        ],
    )
    def test_may_say_its_uplinks_in_place_of_its_oversubscription(self, fabric: dict[str, int], ratio: float) -> None:
        assert cluster(**BOX | NICS | {"nodes": 8}, fabric=fabric).fabric.oversubscription == ratio

    def test_has_a_traffic_class_where_nccl_drives_the_adapters(self) -> None:
        for kind in ({}, {"kind": "infiniband"}, {"kind": "roce"}):
            fabric = cluster(**BOX, fabric={"traffic_class": 106, "service_level": 3, "rails": 4, **kind}).fabric
            assert (fabric.traffic_class, fabric.service_level, fabric.rails) == (106, 3, 4)


class TestARack:
    def test_is_made_of_whole_nodes(self) -> None:
        message = refusal({"gpu": RACK, "nodes": 4, "gpus_per_node": 5})
        assert message.startswith("gpus_per_node: 72 GPUs of an NVLink domain % 5 GPUs of a node = 2; expected")
        assert cluster(gpu=RACK, nodes=1, gpus_per_node=5).nvlink_domain_gpus == 5

    @pytest.mark.parametrize("gpus", [4, 8, 72])
    def test_takes_nodes_of_any_size_that_divides_it(self, gpus: int) -> None:
        assert cluster(gpu=RACK, nodes=18, gpus_per_node=gpus).nvlink_domain_gpus == 72


@pytest.mark.parametrize(
    ("keys", "sockets"),
    [(BOX, 2), ({"gpu": A4090}, 2), ({"gpu": A4090, "gpus_per_node": 4}, 1), ({"gpu": A4090, "sockets": 4}, 4)],
)
def test_sockets_are_two_but_in_a_small_pcie_machine(keys: dict[str, Any], sockets: int) -> None:
    assert cluster(**keys).sockets == sockets


class TestHosts:
    def test_give_the_number_of_nodes(self) -> None:
        keys = {key: value for key, value in BOX.items() if key != "nodes"}
        found = cluster(**keys, hosts=["a", {"address": "b", "port": 2222, "hcas": ["mlx5_0"]}])
        assert (found.nodes, found.hosts[1].port, found.hosts[1].hcas) == (2, 2222, ("mlx5_0",))

    def test_may_be_ports_of_one_address(self) -> None:
        ports = [{"address": "a", "port": 1}, {"address": "a", "port": 2}]
        assert len(cluster(**{**BOX, "nodes": 2}, hosts=ports).hosts) == 2

    def test_may_be_as_many_as_the_largest_cluster_has_nodes(self) -> None:
        hosts = [f"node{number}" for number in range(16_384)]
        assert len(cluster(**{**BOX, "nodes": len(hosts)}, hosts=hosts).hosts) == 16_384
