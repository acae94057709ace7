from dataclasses import replace
from typing import Any

import pytest

from tests.hosts.fleets import GIB, cluster, facts, fleet, gpu, needs, outcome, see
from topoplan import catalog
from topoplan.hosts.facts import GpuProcess
from topoplan.hosts.preflight.gpus import gpus_distinct, gpus_free, gpus_kind, gpus_present, is_kind, peer_access


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((gpu(0), gpu(1)), "ok"),
        ((gpu(0), gpu(1), gpu(2)), "ok"),
        ((gpu(0),), "failure"),
        ((), "failure"),
        ((gpu(0), gpu(1, mig=True)), "failure"),
        ((gpu(0), gpu(1), gpu(2, mig=True)), "ok"),
        (None, "skipped"),
    ],
)
def test_as_many_whole_gpus_as_the_spec_has(gpus: Any, expected: str) -> None:
    assert outcome(gpus_present, fleet(facts(gpus=gpus))) == expected


def test_why_gpus_are_not_known_is_told() -> None:
    found = see(gpus_present, fleet(facts(gpus=None, missing={"gpus": "nvidia-smi: not installed"})))
    assert found.what == "nvidia-smi: not installed"


@pytest.mark.parametrize(
    ("driver", "name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb", True),
        ("NVIDIA H100 PCIe", "h100-sxm-80gb", False),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb", True),
        ("NVIDIA H200", "h20-sxm-96gb", False),
        ("NVIDIA H20", "h20-sxm-96gb", True),
        ("NVIDIA GB200", "b200-sxm-180gb", False),
        ("NVIDIA GB200", "gb200-nvl72-186gb", True),
        ("NVIDIA B200", "b200-sxm-180gb", True),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb", True),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb", True),
        ("NVIDIA A800-SXM4-80GB", "a100-sxm-80gb", False),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb", True),
        ("NVIDIA L40S", "l40s-48gb", True),
        ("NVIDIA L40", "l40s-48gb", False),
        ("NVIDIA RTX A6000", "a6000-48gb", True),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb", True),
        ("NVIDIA H100 80GB HBM3", "my-own-card", True),
    ],
)
def test_the_driver_name_is_matched_with_the_spec_name(driver: str, name: str, expected: bool) -> None:
    assert is_kind(driver, name) is expected


def test_every_card_of_the_catalog_is_its_own_kind_alone() -> None:
    """By its name in capitals, as drivers write it: the name of no other model matches."""
    models = {name.split("-")[0] for name in catalog.gpu_names()}
    for model in models:
        for other in catalog.gpu_names():
            form = "PCIe" if "pcie" in other else ""
            assert is_kind(f"NVIDIA {model.upper()} {form}", other) == (model == other.split("-")[0]), (model, other)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok"),
        ({"name": "NVIDIA A100-SXM4-80GB"}, "warning"),
        ({"memory_bytes": 64 * GIB}, "warning"),
        ({"memory_bytes": 40 * GIB}, "failure"),
        ({"memory_bytes": None}, "ok"),
    ],
)
def test_another_card_than_planned(changes: dict[str, Any], expected: str) -> None:
    host = facts(gpus=(gpu(0, **changes), gpu(1, **changes)))
    assert outcome(gpus_kind, fleet(host, wanted=needs())) == expected


def test_cards_of_two_kinds_are_a_warning() -> None:
    assert outcome(gpus_kind, fleet(facts(gpus=(gpu(0), gpu(1, name="NVIDIA H200"))))) == "warning"


def test_no_gpus_have_no_kind() -> None:
    for check in (gpus_kind, gpus_free, gpus_distinct, peer_access):
        assert outcome(check, fleet(facts(gpus=None))) is None
        assert outcome(check, fleet(facts(gpus=()))) is None


PROCESS = GpuProcess(
    pid=4242, gpu_uuid="GPU-0-1", memory_bytes=30 * GIB, name="/usr/bin/python3", user="ann", age_s=7200
)


@pytest.mark.parametrize(
    ("used", "processes", "wanted", "expected"),
    [
        (4 * 2**20, (), needs(), "ok"),
        (4 * 2**20, None, needs(), "ok"),
        (30 * GIB, (PROCESS,), needs(), "failure"),
        (10 * GIB, (PROCESS,), needs(), "warning"),
        (70 * GIB, (), None, "warning"),
        (4 * 2**20, (PROCESS,), needs(), "warning"),
        (None, (PROCESS,), needs(), "skipped"),
    ],
)
def test_gpus_that_others_use(used: int | None, processes: Any, wanted: Any, expected: str) -> None:
    cards = tuple(gpu(index, memory_used_bytes=used) for index in range(2))
    assert outcome(gpus_free, fleet(facts(gpus=cards, gpu_processes=processes), wanted=wanted)) == expected


def test_who_uses_a_gpu_is_named() -> None:
    cards = (gpu(0), gpu(1, memory_used_bytes=30 * GIB))
    found = see(gpus_free, fleet(facts(gpus=cards, gpu_processes=(PROCESS,)), wanted=needs()))
    assert "on GPU 1 where" in found.what
    assert "pid 4242 (python3 of ann for 2h) holds 30.0GiB" in found.what


def test_gpus_beyond_those_of_the_run_may_be_in_use() -> None:
    cards = (gpu(0), gpu(1), gpu(2, memory_used_bytes=79 * GIB))
    busy = replace(PROCESS, gpu_uuid="GPU-0-2")
    assert outcome(gpus_free, fleet(facts(gpus=cards, gpu_processes=(busy,)), wanted=needs())) == "ok"


def test_one_machine_under_two_names() -> None:
    apart = fleet(facts(0), facts(1))
    assert [outcome(gpus_distinct, apart, number) for number in range(2)] == ["ok", "ok"]
    same = fleet(facts(0), facts(1, gpus=(gpu(0), gpu(1))))
    found = see(gpus_distinct, same, 1)
    assert found.outcome == "failure"
    assert "same GPUs as n0" in found.what


def test_consumer_cards_may_hang_without_nvlink() -> None:
    cards = tuple(gpu(index, name="NVIDIA GeForce RTX 4090") for index in range(2))
    pcie = {("GPU0", "GPU1"): "PHB", ("GPU1", "GPU0"): "PHB"}
    assert outcome(peer_access, fleet(facts(gpus=cards, topology=pcie))) == "warning"
    assert outcome(peer_access, fleet(facts(gpus=cards, topology=None))) == "warning"
    assert outcome(peer_access, fleet(facts(gpus=cards, topology={("GPU0", "GPU1"): "NV4"}))) == "ok"
    told = cluster(nodes=1, env={"NCCL_P2P_DISABLE": "1"})
    assert outcome(peer_access, fleet(facts(gpus=cards), of=told)) == "ok"
    assert outcome(peer_access, fleet(facts(gpus=cards[:1]))) is None
    assert outcome(peer_access, fleet(facts())) is None


@pytest.mark.parametrize(
    ("name", "driver", "env", "kind", "remedy"),
    [
        ("RTX 4090", "535.183.01", {}, "ethernet", "NCCL_P2P_DISABLE: '1' under env"),
        ("RTX 4090", "535.183.01", {}, "infiniband", "NCCL_IB_DISABLE: '0' and NCCL_P2P_DISABLE: '1' under env"),
        ("RTX 4090", "535.183.01", {"NCCL_P2P_DISABLE": "1"}, "infiniband", "set NCCL_IB_DISABLE: '0' under env"),
        ("RTX 4090", "535.183.01", {"NCCL_P2P_DISABLE": "1"}, "ethernet", None),
        ("RTX 4090", "550.40.07", {"NCCL_P2P_DISABLE": "1"}, "infiniband", None),
        ("RTX 3090", "535.183.01", {"NCCL_P2P_DISABLE": "1"}, "infiniband", None),
    ],
)
def test_accelerate_refuses_rtx_40_cards_with_an_old_driver(
    name: str, driver: str, env: dict[str, str], kind: str, remedy: str | None
) -> None:
    cards = tuple(gpu(index, name=f"NVIDIA GeForce {name}") for index in range(2))
    hosts = [facts(number, gpus=cards, versions={"driver": driver}) for number in range(2)]
    found = see(peer_access, fleet(*hosts, of=cluster(kind=kind, env=env)))
    if remedy is None:
        assert found.outcome == "ok"
    else:
        assert found.outcome == "warning"
        assert found.what == f"driver {driver} with {cards[0].name}: trainers that use accelerate refuse to start"
        assert found.remedy.startswith("install driver 550.40.07 or newer, or set ")
        assert remedy in found.remedy
