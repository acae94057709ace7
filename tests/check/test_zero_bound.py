"""What DeepSpeed and its like need at the least, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.check.written import configuration, launch, setup, swift_zero2
from topoplan.check.finding import Finding
from topoplan.check.setup import Configuration, Setup
from topoplan.check.zero_bound import Bound, bound_findings, bound_of
from topoplan.specs.cluster import Cluster
from topoplan.specs.load import load_cluster

PARAMETERS = 30_532_122_624


@pytest.fixture(scope="module")
def a100s() -> Cluster:
    return load_cluster("cluster_specs/a100-1x8.yaml")


def bound(one: Configuration, where: Setup, cluster: Cluster | None) -> Bound:
    found = bound_of(one, where, cluster)
    assert found is not None
    return found


def told(one: Configuration, where: Setup, cluster: Cluster | None) -> list[Finding]:
    return list(bound_findings(bound(one, where, cluster), one, cluster))


def test_a_30b_model_under_zero_2_on_five_80_gb_cards_cannot_fit(a100s: Cluster) -> None:
    one, where = swift_zero2()
    (finding,) = told(one, where, a100s)

    assert (finding.rule, finding.severity, finding.line) == ("zero-cannot-fit", "error", 3)
    need = 2 * PARAMETERS + 2 * PARAMETERS / 5 + 12 * PARAMETERS / 5
    assert f"{need / 2**30:.1f} GiB ({need / 1e9:.1f} GB) on each of 5 GPUs" in finding.what
    assert finding.what.endswith("and a100-sxm-80gb has 80.0")
    assert finding.why.startswith(
        "61.1 GB weights (2 bytes * 30.53B) + 12.2 GB gradients (2 bytes * 30.53B / 5 GPUs)"
        " + 73.3 GB optimizer states (12 bytes * 30.53B / 5 GPUs)"
    )


def test_the_remedy_holds(a100s: Cluster) -> None:
    one, where = swift_zero2()
    (finding,) = told(one, where, a100s)
    found = bound(one, where, a100s)

    # Stage 3 alone does not hold it on five cards, and does on six.
    assert found.under(type(found.sharding)(name="", stage=3)).gpu_bytes > a100s.gpu.memory_bytes
    assert found.under(type(found.sharding)(name="", stage=3), 6).gpu_bytes < a100s.gpu.memory_bytes
    assert finding.remedy.startswith("its states would fit with stage 3 on 6 GPUs or more, or stage 2 with its")
    host_gib = 14 * PARAMETERS / 2**30
    assert (
        f"stage 3 with its optimizer offloaded (11.4 GiB and {host_gib:.0f} GiB of host memory a node)"
        in finding.remedy
    )


def test_without_a_cluster_it_is_a_warning_about_cards_of_80_gb() -> None:
    one, where = swift_zero2()
    (finding,) = told(one, where, None)

    assert (finding.rule, finding.severity) == ("zero-cannot-fit", "warning")
    small, its_setup = swift_zero2(model="Qwen/Qwen3-0.6B")
    assert told(small, its_setup, None) == []


def test_what_may_fit_is_a_note_that_says_what_is_not_predicted(a100s: Cluster) -> None:
    one, where = swift_zero2(model="Qwen/Qwen3-8B", deepspeed="zero3")
    (finding,) = told(one, where, a100s)

    assert (finding.rule, finding.severity) == ("zero-not-predicted", "note")
    assert finding.what.startswith("ZeRO-3 of Qwen/Qwen3-8B is not predicted yet")


def test_the_host_must_hold_what_is_offloaded(a100s: Cluster) -> None:
    small = load_cluster("cluster_specs/a100-1x8.yaml", overrides=("host_memory=256GB",))
    one, where = swift_zero2(deepspeed="zero3_offload")

    assert [finding.rule for finding in told(one, where, a100s)] == ["zero-not-predicted"]
    finding = told(one, where, small)[-1]
    assert (finding.rule, finding.severity) == ("zero-host-memory", "error")
    assert f"{16 * PARAMETERS / 2**30:.0f} GiB of a node's host memory, which has 238" in finding.what


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
    found = bound(beside, setup(beside), a100s)
    assert (found.sharding.stage, found.sharding.offload_optimizer, found.sharding.offload_param) == (3, "nvme", "")
    assert found.sharding.uses_nvme

    given = configuration('{"zero_optimization": {"stage": 1}}', trainer="deepspeed", name="else/where.json")
    names_it = configuration(text.format("where.json"))
    assert bound(names_it, setup(names_it, given), a100s).sharding.name == "ZeRO-1"


def states_of(keys: dict[str, Any], cluster: Cluster) -> tuple[float, float, float]:
    lines = {"model_name_or_path": "Qwen/Qwen3-8B", "finetuning_type": "full"} | keys
    one = configuration("".join(f"{key}: {value}\n" for key, value in lines.items()))
    found = bound(one, setup(one), cluster)
    states = found.states
    each = found.parameters
    return states.weights_bytes / each, states.gradients_bytes / each, states.optimizer_bytes / each


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        # LLaMA-Factory keeps what it trains in fp32, with moments as wide
        ({}, (4, 4, 8)),
        ({"pure_bf16": "true"}, (2, 2, 4)),
        ({"deepspeed": "ds_z2_config.json"}, (2, 2 / 8, 12 / 8)),
        ({"deepspeed": "ds_z3_config.json"}, (2 / 8, 2 / 8, 12 / 8)),
        ({"fsdp": "full_shard auto_wrap"}, (2 / 8, 2 / 8, 4 / 8)),
        # only what is sure: an adapter's few weights are left out, and so are the states of other optimizers
        ({"finetuning_type": "lora"}, (2, 0, 0)),
        ({"finetuning_type": "lora", "quantization_bit": 4}, (0.5, 0, 0)),
        ({"deepspeed": "ds_z0_config.json", "use_galore": "true"}, (2, 2, 0)),
        ({"deepspeed": "ds_z0_config.json", "optim": "adafactor"}, (2, 2, 0)),
    ],
)
def test_bytes_of_a_parameter(keys: dict[str, Any], bytes_each: tuple[float, ...], a100s: Cluster) -> None:
    assert states_of(keys, a100s) == pytest.approx(bytes_each)


def test_a_tower_that_may_be_frozen_has_no_sure_gradients(a100s: Cluster) -> None:
    one, where = swift_zero2(model="Qwen/Qwen3-VL-8B-Instruct")
    found = bound(one, where, a100s)

    assert found.model.vision is not None
    assert found.trained == found.parameters - found.model.vision.parameters


def test_the_states_are_those_of_the_gpus_that_the_command_starts(a100s: Cluster) -> None:
    one, where = swift_zero2()
    assert bound(one, where, a100s).gpus == 5
    assert bound(one, setup(one), a100s).gpus == 8  # no command: the whole cluster
    assert bound_of(one, setup(one), None) is None


def test_swift_without_processes_spreads_the_model_and_is_left_alone(a100s: Cluster) -> None:
    one, _ = swift_zero2(deepspeed=None)
    alone = setup(one, launches=(launch("swift", "sft", starter="", of=one),))

    assert bound_of(one, alone, a100s) is None
