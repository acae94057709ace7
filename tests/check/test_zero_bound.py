"""What DeepSpeed and its like need at the least, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.check.setups import all_of, configuration, launch, swift_zero2
from topoplan.check.read.setup import Configuration, Setup
from topoplan.check.rules.finding import Finding
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


def states_of(keys: dict[str, Any], cluster: Cluster) -> tuple[float, float, float]:
    lines = {"model_name_or_path": "Qwen/Qwen3-8B", "finetuning_type": "full"} | keys
    one = configuration("".join(f"{key}: {value}\n" for key, value in lines.items()))
    found = bound(one, all_of(one), cluster)
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
    assert bound(one, all_of(one), a100s).gpus == 8  # no command: the whole cluster
    assert bound_of(one, all_of(one), None) is None


def test_what_accelerate_may_shard_is_a_warning(a100s: Cluster) -> None:
    one = configuration("model_name_or_path: Qwen/Qwen3-30B-A3B\nfinetuning_type: full\nstage: sft\nbf16: true\n")
    (alone,) = told(one, all_of(one), a100s)
    (started,) = told(one, all_of(one, launches=(launch(options={"nproc_per_node": "8"}, of=one),)), a100s)

    assert (alone.severity, started.severity) == ("warning", "error")
    assert "accelerate launch" in alone.why
    assert "accelerate launch" not in started.why
