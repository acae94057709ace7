"""How a configuration shares out its states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.check.setups import all_of, configuration, launch, swift_zero2
from topoplan.check.read.setup import Configuration, Setup
from topoplan.check.zero_bound import Bound, bound_of
from topoplan.specs.cluster import Cluster
from topoplan.specs.load import load_cluster


@pytest.fixture(scope="module")
def a100s() -> Cluster:
    return load_cluster("cluster_specs/a100-1x8.yaml")


def bound(one: Configuration, where: Setup, cluster: Cluster | None) -> Bound:
    found = bound_of(one, where, cluster)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("written", "name", "offload"),
    [
        ("zero0", "ZeRO-0", ("", "")),
        ("zero2_offload", "ZeRO-2", ("cpu", "")),
        ("zero3_offload", "ZeRO-3", ("cpu", "cpu")),
        ("examples/deepspeed/ds_z3_config.json", "ZeRO-3", ("", "")),
        ("examples/deepspeed/ds_z2_offload_config.json", "ZeRO-2", ("cpu", "")),
    ],
)
def test_well_known_files_are_known_by_their_names(
    written: str, name: str, offload: tuple[str, str], a100s: Cluster
) -> None:
    one, where = swift_zero2(deepspeed=written)
    sharding = bound(one, where, a100s).sharding

    assert (sharding.name, (sharding.offload_optimizer, sharding.offload_param)) == (name, offload)


def test_a_file_whose_name_says_nothing_is_left_alone(a100s: Cluster) -> None:
    one, where = swift_zero2(deepspeed="configs/ours.json")

    assert bound_of(one, where, a100s) is None


def test_a_deepspeed_file_is_read_beside_the_configuration_or_among_what_was_given(
    tmp_path: Path, a100s: Cluster
) -> None:
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "none"}}
    (tmp_path / "ours.json").write_text(json.dumps({"zero_optimization": zero}))
    text = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\ndeepspeed: {}\n"
    beside = configuration(text.format("ours.json"), name=str(tmp_path / "train.yaml"))
    found = bound(beside, all_of(beside), a100s)
    assert (found.sharding.stage, found.sharding.offload_optimizer, found.sharding.offload_param) == (3, "nvme", "")
    assert found.sharding.uses_nvme

    given = configuration('{"zero_optimization": {"stage": 1}}', trainer="deepspeed", name="else/where.json")
    names_it = configuration(text.format("where.json"))
    assert bound(names_it, all_of(names_it, given), a100s).sharding.name == "ZeRO-1"


def test_swift_without_processes_spreads_the_model_and_is_left_alone(a100s: Cluster) -> None:
    one, _ = swift_zero2(deepspeed=None)
    alone = all_of(one, launches=(launch("swift", "sft", starter="", of=one),))

    assert bound_of(one, alone, a100s) is None
