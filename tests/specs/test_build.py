from typing import Any

import pytest

from topoplan import catalog
from topoplan.errors import InputError, LayoutError, SpecError, UnitError
from topoplan.specs.cluster import MOST_GPUS, Cluster
from topoplan.specs.load import spec_from_document
from topoplan.specs.spec import Spec

JOB = {"seq_len": 4096, "global_batch_size": 64}
BOX = {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8, "nvlink_bandwidth": "900GB/s", "ib_bandwidth": "400Gb/s"}
OWN_GPU = {"name": "x200", "memory": "96GiB", "bf16_tflops": 500, "memory_bandwidth": "4TB/s"}


def _spec(cluster: dict[str, Any], model: str = "Qwen/Qwen3-8B", **job: Any) -> Spec:
    return spec_from_document({"cluster": cluster, "model": {"name": model}, "job": {**JOB, **job}}, where="run:1")


def _cluster(**keys: Any) -> Cluster:
    return _spec(keys).cluster


def _refused(
    kind: type[InputError], *, model: str = "Qwen/Qwen3-8B", job: dict[str, Any] | None = None, **keys: Any
) -> str:
    with pytest.raises(kind) as error:
        _spec(keys or BOX, model, **(job or {}))
    message = str(error.value)
    assert message.startswith("run:1: ")
    return message.removeprefix("run:1: ")


class TestTheShortForm:
    def test_takes_every_link_of_the_usual_machine(self) -> None:
        gpu = catalog.gpu("h100-sxm-80gb")
        cluster = _cluster(gpu="h100-sxm-80gb", nodes=4, gpus_per_node=8)
        assert cluster.nvlink_bytes_per_s == gpu.nvlink_bytes_per_s == 450e9
        assert cluster.nvlink_domain_gpus == 8
        assert (cluster.nics_per_node, cluster.nic_bytes_per_s) == (8, 50e9)
        assert cluster.pcie_bytes_per_s == gpu.pcie_bytes_per_s
        assert cluster.world_size == 32
        assert cluster.name == "h100-sxm-80gb-4x8"

    def test_is_enough_with_the_gpu_alone(self) -> None:
        cluster = _cluster(gpu="h200-sxm-141gb")
        assert (cluster.nodes, cluster.gpus_per_node) == (1, 8)

    @pytest.mark.parametrize("gpus", [1, 2, 4, 7, 8])
    def test_has_one_nic_a_gpu_in_smaller_boxes(self, gpus: int) -> None:
        cluster = _cluster(gpu="h100-sxm-80gb", nodes=2, gpus_per_node=gpus)
        assert cluster.nics_per_node == gpus
        assert cluster.nvlink_domain_gpus == gpus

    def test_of_a_rack_spans_nodes_up_to_its_72_gpus(self) -> None:
        assert _cluster(gpu="gb200-nvl72-186gb", nodes=18, gpus_per_node=4).nvlink_domain_gpus == 72
        assert _cluster(gpu="gb200-nvl72-186gb", nodes=36, gpus_per_node=4).nvlink_domain_gpus == 72
        assert _cluster(gpu="gb200-nvl72-186gb", nodes=2, gpus_per_node=4).nvlink_domain_gpus == 8

    def test_of_a_pcie_card_has_no_nvlink(self) -> None:
        cluster = _cluster(gpu="a100-pcie-80gb", nodes=2, gpus_per_node=8)
        assert (cluster.nvlink_bytes_per_s, cluster.nvlink_domain_gpus) == (0.0, 1)

    def test_takes_gpu_names_in_any_case(self) -> None:
        assert _cluster(gpu="H100-SXM-80GB", nodes=1).gpu.name == "h100-sxm-80gb"


class TestTheWholeForm:
    def test_halves_nvlink_and_keeps_the_network_as_quoted(self) -> None:
        cluster = _cluster(**BOX, nics_per_node=4)
        assert cluster.nvlink_bytes_per_s == 450e9
        assert (cluster.nics_per_node, cluster.nic_bytes_per_s) == (4, 50e9)

    def test_without_nvlink_is_a_pcie_machine(self) -> None:
        cluster = _cluster(gpu="h100-sxm-80gb", nodes=2, gpus_per_node=8, ib_bandwidth="400Gb/s")
        assert (cluster.nvlink_bytes_per_s, cluster.nvlink_domain_gpus) == (0.0, 1)

    def test_needs_a_network_above_one_node(self) -> None:
        message = _refused(SpecError, gpu="h100-sxm-80gb", nodes=4, gpus_per_node=8, nvlink_bandwidth="900GB/s")
        assert message.startswith("`ib_bandwidth` is missing, and 4 nodes need a network; add `ib_bandwidth: 400Gb/s`")

    def test_of_one_node_needs_none(self) -> None:
        assert _cluster(gpu="h100-sxm-80gb", nodes=1, gpus_per_node=8, nvlink_bandwidth="900GB/s").nodes == 1

    def test_needs_its_gpus_per_node(self) -> None:
        message = _refused(SpecError, gpu="h100-sxm-80gb", nodes=1, nvlink_bandwidth="900GB/s")
        assert message == "`gpus_per_node` is missing; add `gpus_per_node: 8`"

    def test_of_a_card_without_nvlink_refuses_nvlink(self) -> None:
        message = _refused(SpecError, **{**BOX, "gpu": "rtx4090-24gb"})
        assert "a machine of rtx4090-24gb has no NVLink" in message

    @pytest.mark.parametrize("rate", ["900Gb/s", "900Gbps", "900 Gbit/s"])
    def test_knows_nvlink_in_bits_for_a_slip(self, rate: str) -> None:
        message = _refused(UnitError, **{**BOX, "nvlink_bandwidth": rate})
        assert message.endswith("an eighth of the NVLink of h100-sxm-80gb; did you mean 900GB/s?")

    @pytest.mark.parametrize("rate", ["112.5GB/s", "112.5 Gbytes/s"])
    def test_takes_a_slow_nvlink_when_it_is_in_bytes(self, rate: str) -> None:
        assert _cluster(**{**BOX, "nvlink_bandwidth": rate}).nvlink_bytes_per_s == 56.25e9

    def test_takes_seven_gpus_a_node(self) -> None:
        assert _cluster(**{**BOX, "gpus_per_node": 7}).world_size == 28

    def test_takes_as_many_gpus_as_the_largest_cluster_has(self) -> None:
        assert _cluster(**{**BOX, "nodes": 16_384}).world_size == MOST_GPUS
        assert _cluster(**{**BOX, "nodes": MOST_GPUS, "gpus_per_node": 1}).world_size == MOST_GPUS
        message = _refused(SpecError, **{**BOX, "nodes": 16_385})
        assert message == "nodes: 16385 * gpus_per_node 8 = 131080 GPUs; expected at most 131072"

    def test_passes_the_optional_keys_on(self) -> None:
        cluster = _cluster(
            **BOX, host_memory="2TB", cpu_cores=96, margin="5%", env={"A": 1}, pcie_bandwidth="50GB/s", name="n"
        )
        assert (cluster.host_memory_bytes, cluster.cpu_cores, cluster.margin) == (2 * 10**12, 96, 0.05)
        assert (cluster.env, cluster.pcie_bytes_per_s, cluster.name) == ({"A": "1"}, 50e9, "n")


class TestAGpuBlock:
    def test_describes_a_card_of_ones_own(self) -> None:
        gpu = _cluster(**{**BOX, "gpu": OWN_GPU}).gpu
        assert (gpu.name, gpu.memory_bytes, gpu.bf16_flops, gpu.fp16_flops) == ("x200", 96 * 2**30, 500e12, 500e12)
        assert (gpu.architecture, gpu.fp8_flops, gpu.memory_bytes_per_s) == ("ampere", None, 4e12)

    def test_tells_its_generation_by_its_precisions(self) -> None:
        assert _cluster(**{**BOX, "gpu": {**OWN_GPU, "fp8_tflops": 1000}}).gpu.architecture == "hopper"
        assert _cluster(**{**BOX, "gpu": {**OWN_GPU, "fp4_tflops": 2000}}).gpu.architecture == "blackwell"
        assert _cluster(**{**BOX, "gpu": {**OWN_GPU, "architecture": "ada"}}).gpu.architecture == "ada"

    def test_of_a_catalog_name_changes_what_it_gives(self) -> None:
        gpu = _cluster(**{**BOX, "gpu": {"name": "h100-sxm-80gb", "memory": "95GiB"}}).gpu
        assert gpu.memory_bytes == 95 * 2**30
        assert gpu.bf16_flops == catalog.gpu("h100-sxm-80gb").bf16_flops

    @pytest.mark.parametrize("key", ["memory", "bf16_tflops", "memory_bandwidth"])
    def test_says_which_figure_is_missing(self, key: str) -> None:
        block = {name: value for name, value in OWN_GPU.items() if name != key}
        assert _refused(SpecError, **{**BOX, "gpu": block}).startswith(f"`{key}` is missing in `gpu`")

    def test_has_no_usual_machine(self) -> None:
        assert "`gpus_per_node` is missing" in _refused(SpecError, gpu=OWN_GPU, nodes=4)
        assert "`ib_bandwidth` is missing" in _refused(SpecError, gpu=OWN_GPU, nodes=4, gpus_per_node=8)
        assert _cluster(gpu=OWN_GPU, nodes=1, gpus_per_node=8).nvlink_bytes_per_s == 0.0

    def test_with_a_name_alone_is_looked_up(self) -> None:
        message = _refused(SpecError, **{**BOX, "gpu": {"name": "h100-sxm-80"}})
        assert "did you mean 'h100-sxm-80gb'?" in message


class TestTheFabric:
    def test_has_the_defaults_of_rdma(self) -> None:
        fabric = _cluster(**BOX).fabric
        assert (fabric.kind, fabric.latency_s, fabric.oversubscription) == ("infiniband", 5e-6, 1.0)

    def test_of_plain_ethernet_is_slower_to_answer(self) -> None:
        assert _cluster(**BOX, fabric={"kind": "ethernet"}).fabric.latency_s == 30e-6
        assert _cluster(**BOX, fabric={"kind": "ethernet", "latency": "20us"}).fabric.latency_s == 20e-6

    def test_may_say_its_uplinks_in_place_of_its_oversubscription(self) -> None:
        def ratio(**fabric: int) -> float:
            return _cluster(**BOX | {"nodes": 8}, nics_per_node=8, fabric=fabric).fabric.oversubscription

        assert ratio(nodes_per_leaf=4, uplinks_per_leaf=16) == 2.0
        assert ratio(nodes_per_leaf=4, uplinks_per_leaf=64) == 1.0
        assert ratio(nodes_per_leaf=4, uplinks_per_leaf=1, rails=8) == 4.0
        assert ratio(nodes_per_leaf=8, uplinks_per_leaf=0) == 1.0

    def test_cannot_have_a_leaf_without_uplink_among_others(self) -> None:
        fabric = {"nodes_per_leaf": 4, "uplinks_per_leaf": 0}
        message = _refused(SpecError, **BOX | {"nodes": 8}, nics_per_node=8, fabric=fabric)
        assert message == (
            "fabric.uplinks_per_leaf: a leaf of 4 nodes has no uplink, and the cluster has 8 nodes;"
            " expected uplinks where nodes are on more than one leaf"
        )

    def test_cannot_say_its_uplinks_twice_or_without_a_leaf(self) -> None:
        both = {"nodes_per_leaf": 4, "uplinks_per_leaf": 8, "oversubscription": 2}
        assert "is given beside oversubscription" in _refused(SpecError, **BOX, nics_per_node=8, fabric=both)
        alone = _refused(SpecError, **BOX, nics_per_node=8, fabric={"uplinks_per_leaf": 8})
        assert alone.endswith("uplinks_per_leaf: is given without nodes_per_leaf; add nodes_per_leaf")

    def test_cannot_have_more_rails_than_nics(self) -> None:
        message = _refused(SpecError, **BOX, nics_per_node=8, fabric={"rails": 16})
        assert message.startswith("fabric.rails: rails 16 > nics_per_node 8")

    def test_has_as_many_nics_on_every_rail(self) -> None:
        message = _refused(SpecError, **BOX, nics_per_node=8, fabric={"rails": 3})
        assert message.startswith("fabric.rails: nics_per_node 8 % rails 3 = 2; expected")
        assert _cluster(**BOX, nics_per_node=8, fabric={"rails": 4}).fabric.rails == 4

    def test_of_plain_ethernet_has_no_rdma_adapters(self) -> None:
        hosts = ["a", {"address": "b", "hcas": ["mlx5_0"]}]
        box = {**BOX, "nodes": 2, "hosts": hosts}
        message = _refused(SpecError, **box, fabric={"kind": "ethernet"})
        assert message.startswith("hosts[1].hcas: RDMA adapters with fabric.kind ethernet")
        assert _cluster(**box, fabric={"kind": "roce"}).fabric.kind == "roce"
        message = _refused(SpecError, **box, fabric={"kind": "efa"})
        assert message.endswith("fabric.kind efa, whose plugin takes all adapters that there are; leave hcas out")

    def test_has_a_traffic_class_where_nccl_drives_the_adapters(self) -> None:
        keys = {"traffic_class": 106, "service_level": 3}
        for kind in ({}, {"kind": "infiniband"}, {"kind": "roce"}):
            fabric = _cluster(**BOX, fabric={**keys, **kind}).fabric
            assert (fabric.traffic_class, fabric.service_level) == (106, 3)
        for kind in ("ethernet", "efa", "tcpxo"):
            message = _refused(SpecError, **BOX, fabric={"kind": kind, "traffic_class": 0})
            assert message.startswith(
                "fabric.traffic_class: NCCL gives it to InfiniBand and RoCE alone, and fabric.kind is"
            )


class TestARack:
    def test_is_made_of_whole_nodes(self) -> None:
        message = _refused(SpecError, gpu="gb200-nvl72-186gb", nodes=4, gpus_per_node=5)
        assert message.startswith("gpus_per_node: 72 GPUs of an NVLink domain % 5 GPUs of a node = 2; expected")

    @pytest.mark.parametrize("gpus", [4, 8, 72])
    def test_takes_nodes_of_any_size_that_divides_it(self, gpus: int) -> None:
        assert _cluster(gpu="gb200-nvl72-186gb", nodes=18, gpus_per_node=gpus).nvlink_domain_gpus == 72

    def test_is_not_asked_for_by_a_machine_alone(self) -> None:
        assert _cluster(gpu="gb200-nvl72-186gb", nodes=1, gpus_per_node=5).nvlink_domain_gpus == 5


class TestSockets:
    def test_are_two_but_in_a_small_pcie_machine(self) -> None:
        assert _cluster(**BOX).sockets == 2
        assert _cluster(gpu="rtx4090-24gb", nodes=1, gpus_per_node=8).sockets == 2
        assert _cluster(gpu="rtx4090-24gb", nodes=1, gpus_per_node=4).sockets == 1
        assert _cluster(gpu="rtx4090-24gb", nodes=1, gpus_per_node=4, sockets=2).sockets == 2


class TestHosts:
    def test_are_one_for_each_node(self) -> None:
        message = _refused(SpecError, **BOX, hosts=["a", "b"])
        assert message.startswith("hosts: 2 hosts != nodes 4")

    def test_give_the_number_of_nodes(self) -> None:
        keys = {key: value for key, value in BOX.items() if key != "nodes"}
        cluster = _cluster(**keys, hosts=["a", {"address": "b", "port": 2222, "hcas": ["mlx5_0"]}])
        assert cluster.nodes == 2
        assert cluster.hosts[1].port == 2222
        assert cluster.hosts[1].hcas == ("mlx5_0",)

    def test_are_different_machines(self) -> None:
        assert "hosts[1]: a is listed twice" in _refused(SpecError, **{**BOX, "nodes": 2}, hosts=["a", "a"])
        ports = [{"address": "a", "port": 1}, {"address": "a", "port": 2}]
        assert len(_cluster(**{**BOX, "nodes": 2}, hosts=ports).hosts) == 2

    def test_may_be_as_many_as_the_largest_cluster_has_nodes(self) -> None:
        hosts = [f"node{number}" for number in range(16_384)]
        assert len(_cluster(**{**BOX, "nodes": len(hosts)}, hosts=hosts).hosts) == 16_384


class TestTheJob:
    @pytest.mark.parametrize(
        ("job", "rate"),
        [
            ({}, 2e-5),
            ({"finetuning": "lora"}, 1e-4),
            ({"finetuning": "qlora"}, 1e-4),
            ({"finetuning": "lora", "stage": "dpo"}, 5e-6),
            ({"finetuning": "lora", "learning_rate": 3e-5}, 3e-5),
        ],
    )
    def test_has_the_usual_learning_rate_of_its_method(self, job: dict[str, Any], rate: float) -> None:
        assert _spec(BOX, "Qwen/Qwen3-8B", **job).job.learning_rate == rate

    def test_keeps_the_defaults_of_llamafactory(self) -> None:
        job = _spec(BOX).job
        assert (job.precision, job.finetuning, job.stage, job.freeze_vision_tower) == ("bf16", "full", "sft", True)

    @pytest.mark.parametrize(
        ("gpu", "precision"),
        [("a100-sxm-80gb", "fp8"), ("h100-sxm-80gb", "nvfp4"), ("v100-sxm-32gb", "mxfp8")],
    )
    def test_asks_only_for_precisions_that_the_card_has(self, gpu: str, precision: str) -> None:
        message = _refused(SpecError, gpu=gpu, job={"precision": precision})
        assert f"does not compute in {precision}; expected bf16" in message

    @pytest.mark.parametrize(
        ("model", "job", "said"),
        [
            ("deepseek-ai/DeepSeek-V3", {}, "job.mtp_num_layers: 2 > 1 multi-token-prediction layers of deepseek-ai"),
            ("Qwen/Qwen3-8B", {"stage": "dpo"}, "take their loss from labels, which stage dpo has none of"),
        ],
    )
    def test_predicts_only_tokens_that_it_can(self, model: str, job: dict[str, Any], said: str) -> None:
        assert said in _refused(SpecError, model=model, job={"mtp_num_layers": 2, **job})
        assert _spec(BOX, "Qwen/Qwen3-8B", mtp_num_layers=2).job.mtp_num_layers == 2

    def test_trains_something(self) -> None:
        message = _refused(SpecError, job={"freeze_language_model": True})
        assert "everything is frozen" in message
        frozen = {"freeze_language_model": True, "freeze_vision_tower": False}
        assert _spec(BOX, "Qwen/Qwen3-VL-8B-Instruct", **frozen).job.freeze_language_model


class TestAPin:
    @pytest.mark.parametrize(
        "pin",
        [
            {"tp": 4},
            {"tp": 4, "pp": 2, "cp": 1, "dp": 4},
            {"ep": 4, "etp": 1, "pp": 2},
            {"dp": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4},
            {"pp": 2, "vpp": 3},
            {"recompute": "full"},
            {"recompute": {"granularity": "selective", "modules": ["core_attn"]}},
            {"sequence_parallel": True},
        ],
    )
    def test_that_some_layout_meets_is_kept(self, pin: dict[str, Any]) -> None:
        kept = _spec(BOX, pin=pin).job.pin
        assert kept == ({"recompute": {"granularity": "full"}} if pin.get("recompute") == "full" else pin)

    @pytest.mark.parametrize(
        ("pin", "equation"),
        [
            ({"tp": 4, "pp": 2, "cp": 1, "dp": 8}, "tp 4 * pp 2 * cp 1 * dp 8 = 64 != 32 GPUs (4 nodes * 8)"),
            ({"tp": 4, "pp": 1, "cp": 1, "dp": 4}, "tp 4 * pp 1 * cp 1 * dp 4 = 16 != 32 GPUs (4 nodes * 8)"),
            ({"tp": 16}, "tp 16 > 8 GPUs of the NVLink domain"),
            ({"tp": 3}, "32 GPUs (4 nodes * 8) % (tp 3) = 2"),
            ({"pp": 3, "cp": 2}, "32 GPUs (4 nodes * 8) % (pp 3 * cp 2) (6) = 2"),
            ({"ep": 64}, "32 GPUs (4 nodes * 8) % (ep 64) = 32"),
            ({"micro_batch_size": 3}, "global_batch_size 64 % (micro_batch_size 3) = 1"),
            (
                {"dp": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 8},
                "dp 8 * micro_batch_size 2 * gradient_accumulation_steps 8 = 128 != global_batch_size 64",
            ),
            ({"pp": 1, "vpp": 2}, "vpp 2 > 1 with pp 1"),
            ({"tp": 1, "sequence_parallel": True}, "sequence_parallel with tp 1"),
            ({"overlap_param_gather": True, "distributed_optimizer": False}, "overlap_param_gather without"),
            ({"recompute": {"granularity": "none", "modules": ["mlp"]}}, "recompute.modules with granularity none"),
            (
                {"recompute": {"granularity": "selective", "num_layers": 2}},
                "recompute.num_layers with granularity selective",
            ),
            ({"recompute": {"method": "block", "modules": ["mlp"]}}, "recompute.modules goes with selective"),
        ],
    )
    def test_that_contradicts_itself_shows_the_equation(self, pin: dict[str, Any], equation: str) -> None:
        assert _refused(LayoutError, job={"pin": pin}).startswith(f"pin: {equation}")

    def test_of_tp_stays_in_the_node_without_nvlink(self) -> None:
        message = _refused(LayoutError, gpu="rtx4090-24gb", nodes=2, gpus_per_node=8, job={"pin": {"tp": 16}})
        assert message.startswith("pin: tp 16 > 8 GPUs of one node")

    def test_of_tp_may_span_the_nodes_of_a_rack(self) -> None:
        rack = {"gpu": "gb200-nvl72-186gb", "nodes": 4, "gpus_per_node": 4}
        assert _spec(rack, pin={"tp": 8}).job.pin == {"tp": 8}


class TestTheTuner:
    def test_keys_are_taken_over(self) -> None:
        job = _spec(
            BOX,
            finetuning="qlora",
            lora_rank=32,
            lora_target=["q_proj", "v_proj"],
            quantization_bit=8,
            optimizer="adamw_8bit",
        ).job
        assert (job.finetuning, job.lora_rank, job.lora_target) == ("qlora", 32, ("q_proj", "v_proj"))
        assert (job.quantization_bit, job.optimizer) == (8, "adamw_8bit")
        assert _spec(BOX, pure_bf16=True).job.pure_bf16

    def test_left_out_means_what_the_trainers_take(self) -> None:
        job = _spec(BOX, finetuning="lora").job
        assert (job.lora_rank, job.lora_target, job.quantization_bit) == (None, ("all",), None)
        assert (job.freeze_trainable_layers, job.pure_bf16, job.optimizer) == (2, False, "adamw")

    @pytest.mark.parametrize("bits", [4, 8])
    def test_packs_into_4_or_8_bits(self, bits: int) -> None:
        assert _spec(BOX, finetuning="qlora", quantization_bit=bits).job.quantization_bit == bits

    def test_refuses_other_bits(self) -> None:
        job = {"finetuning": "qlora", "quantization_bit": 6}
        assert _refused(SpecError, job=job) == "job.quantization_bit: 6; expected 4 or 8"

    @pytest.mark.parametrize("count", [1, 36, -1, -36])
    def test_freezes_all_but_some_layers(self, count: int) -> None:
        assert _spec(BOX, finetuning="freeze", freeze_trainable_layers=count).job.freeze_trainable_layers == count

    @pytest.mark.parametrize("count", [0, 37, -37])
    def test_refuses_to_train_layers_that_are_not_there(self, count: int) -> None:
        message = _refused(SpecError, job={"finetuning": "freeze", "freeze_trainable_layers": count})
        assert message == (f"job.freeze_trainable_layers: {count} of 36 layers; expected 1 to 36, or -1 to -36")

    @pytest.mark.parametrize(
        ("key", "value"), [("lora_rank", 0), ("optimizer", "sgd"), ("lora_target", ["q proj"]), ("finetuning", "dora")]
    )
    def test_refuses_what_no_trainer_takes(self, key: str, value: Any) -> None:
        assert key in _refused(SpecError, job={key: value})
