from __future__ import annotations

import json
from typing import Any

import pytest

from tests.reading.setups import FULL, PLAIN, fixed, joined, make_command, make_setup, only, rules, setup_of, with_lines
from topoplan.lint.rules.deepspeed import findings
from topoplan.reading.parts import Part
from topoplan.reading.setup import Launch, Option, Setup

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
"""LLaMA-Factory's own examples/deepspeed/ds_z3_config.json, in short."""


def deepspeed(changes: dict[str, Any] | None = None, zero: dict[str, Any] | None = None) -> Setup:
    data = {**AUTO, **(changes or {})}
    data["zero_optimization"] = {**AUTO["zero_optimization"], **(zero or {})}
    data = {key: value for key, value in data.items() if value is not ...}
    data["zero_optimization"] = {key: value for key, value in data["zero_optimization"].items() if value is not ...}
    return make_setup(json.dumps(data, indent=2) + "\n", "deepspeed", kind="json", name="ds.json")


def launched(setup: Setup, nodes: str, gpus: str) -> Setup:
    options = {"nnodes": Option(value=nodes, line=1), "nproc_per_node": Option(value=gpus, line=1)}
    part = Part(kind="shell", name="run.sh", text="")
    launch = Launch(
        part=part,
        first_line=1,
        last_line=1,
        starter="torchrun",
        options=options,
        program="train.py",
        arguments=(),
        variables=(),
    )
    return Setup(parts=setup.parts, configurations=setup.configurations, launches=(launch,))


def test_the_file_that_everyone_uses_gives_nothing() -> None:
    assert rules(findings, deepspeed()) == []
    assert rules(findings, joined(make_setup(with_lines(FULL, "deepspeed: ds.json")), deepspeed())) == []


@pytest.mark.parametrize(
    ("changes", "zero", "rule", "severity"),
    [
        ({"train_micro_batch": 1}, {}, "deepspeed-unknown-key", "warning"),
        ({}, {"stage3_gather_weights": True}, "deepspeed-unknown-key", "error"),
        ({"activation_checkpointing": {"profile": True}}, {}, "deepspeed-activation-checkpointing", "warning"),
        ({"activation_checkpointing": {"profile": False}}, {}, "deepspeed-activation-checkpointing", "note"),
        ({}, {"allgather_bucket_size": "5e8"}, "deepspeed-wrong-value", "error"),
        ({}, {"reduce_bucket_size": 0.5}, "deepspeed-wrong-value", "error"),
        ({}, {"overlap_comm": "maybe"}, "deepspeed-wrong-value", "error"),
        ({}, {"stage": 4}, "deepspeed-wrong-value", "error"),
        ({}, {"offload_optimizer": "cpu"}, "deepspeed-wrong-value", "error"),
        ({}, {"offload_optimizer": {"device": "gpu"}}, "deepspeed-wrong-value", "error"),
        ({}, {"stage": 2, "offload_param": {"device": "cpu"}}, "deepspeed-offload-without-stage", "warning"),
        ({}, {"stage": 0, "offload_optimizer": {"device": "cpu"}}, "deepspeed-offload-without-stage", "warning"),
        ({}, {"offload_param": {"device": "nvme"}}, "deepspeed-nvme-path", "error"),
        ({}, {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "deepspeed-partial-offload", "error"),
        ({}, {"stage": 2, "zero_quantized_weights": True}, "deepspeed-stage3-key", "warning"),
        ({}, {"stage3_gather_16bit_weights_on_model_save": ...}, "deepspeed-weights-not-gathered", "warning"),
        ({}, {"stage3_gather_16bit_weights_on_model_save": False}, "deepspeed-weights-not-gathered", "warning"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "deepspeed-two-precisions", "error"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {}, "deepspeed-fp16", "note"),
        ({"gradient_clipping": 1.0}, {}, "deepspeed-fixed-values", "note"),
        ({"train_batch_size": 0}, {}, "deepspeed-batch", "error"),
    ],
)
def test_a_mistake_is_found_and_nothing_else(
    changes: dict[str, Any], zero: dict[str, Any], rule: str, severity: str
) -> None:
    setup = deepspeed(changes, zero)
    assert [name for name in rules(findings, setup) if name != rule] in ([], ["deepspeed-weights-not-gathered"])
    assert only(findings, setup, rule).severity == severity


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}},
        {"offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}},
        {"allgather_bucket_size": "500000000"},  # pydantic reads whole numbers in quotes
        {"stage": "auto"},
        {"stage": 2, "zero_hpz_partition_size": 1},
    ],
)
def test_what_is_right_gives_nothing(zero: dict[str, Any]) -> None:
    assert rules(findings, deepspeed(None, zero)) == []


def batch(total: int) -> dict[str, Any]:
    return {"train_batch_size": total, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}


def test_a_whole_batch_holds_for_one_number_of_gpus() -> None:
    finding = only(findings, deepspeed(batch(256)), "deepspeed-batch")
    assert finding.severity == "note"
    assert "holds for 8 GPUs alone" in finding.what
    impossible = only(findings, deepspeed(batch(250)), "deepspeed-batch")
    assert impossible.severity == "error"
    assert "250 % 32 = 26" in impossible.what


def test_the_number_of_gpus_of_a_launch_is_held_against_the_batch() -> None:
    assert "deepspeed-batch" not in rules(findings, launched(deepspeed(batch(256)), "1", "8"))
    finding = only(findings, launched(deepspeed(batch(256)), "4", "8"), "deepspeed-batch")
    assert finding.severity == "error"
    assert "holds for 8 GPUs, and 32 are started" in finding.what
    assert only(findings, launched(deepspeed(batch(256)), "$N", "8"), "deepspeed-batch").severity == "note"


@pytest.mark.parametrize(
    ("changes", "line", "count"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, "per_device_train_batch_size: 4", 0),
        ({"train_micro_batch_size_per_gpu": 4}, "per_device_train_batch_size: 2", 1),
        ({"train_micro_batch_size_per_gpu": 4}, "weight_decay: 0.1", 1),  # the trainer's default is 8
        ({"gradient_clipping": 1.0}, "weight_decay: 0.1", 0),
        ({"bf16": {"enabled": True}}, "weight_decay: 0.1", 0),
        ({"bf16": {"enabled": False}}, "weight_decay: 0.1", 1),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}}}, "weight_decay: 0.1", 0),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, "weight_decay: 0.1", 1),
    ],
)
def test_numbers_are_held_against_the_trainers_own(changes: dict[str, Any], line: str, count: int) -> None:
    trainer = make_setup(with_lines(FULL, f"deepspeed: ds.json\n{line}"))
    setup = joined(trainer, deepspeed(changes))
    assert rules(findings, setup).count("deepspeed-trainer-mismatch") == count


def test_a_number_that_differs_becomes_auto() -> None:
    setup = joined(make_setup(with_lines(FULL, "deepspeed: ds.json")), deepspeed({"gradient_accumulation_steps": 4}))
    finding = only(findings, setup, "deepspeed-trainer-mismatch")
    assert finding.part.name == "ds.json"
    assert json.loads(fixed(finding))["gradient_accumulation_steps"] == "auto"


def test_a_command_of_ms_swift_is_a_trainer_too() -> None:
    command = make_command({"deepspeed": "ds.json", "gradient_accumulation_steps": "8", "bf16": "true"})
    setup = joined(command, deepspeed({"gradient_accumulation_steps": 4, "bf16": {"enabled": True}}))
    assert rules(findings, setup) == ["deepspeed-trainer-mismatch"]


def test_a_block_in_the_trainers_own_file_is_checked_in_its_place() -> None:
    text = PLAIN + "deepspeed:\n  zero_optimization:\n    stage: 2\n    stages: 3\n"
    finding = only(findings, make_setup(text), "deepspeed-unknown-key")
    assert finding.line == len(PLAIN.splitlines()) + 4
    megatron = make_setup(text, variables={"USE_MCA": "1"})
    assert rules(findings, megatron) == []  # never read


def test_lora_saves_its_adapter_without_gathering() -> None:
    without = deepspeed(None, {"stage3_gather_16bit_weights_on_model_save": ...})
    assert rules(findings, joined(make_setup(with_lines(PLAIN, "deepspeed: ds.json")), without)) == []
    full = joined(make_setup(with_lines(FULL, "deepspeed: ds.json")), without)
    finding = only(findings, full, "deepspeed-weights-not-gathered")
    assert json.loads(fixed(finding))["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize("line", ["pure_bf16: true", "use_unsloth: true", "quantization_bit: 8"])
def test_what_llamafactory_refuses_with_zero_3_is_found(line: str) -> None:
    setup = joined(make_setup(with_lines(PLAIN, f"deepspeed: ds.json\n{line}")), deepspeed())
    assert rules(findings, setup) == ["deepspeed-zero3-conflict"]
    assert (
        rules(findings, joined(make_setup(with_lines(PLAIN, "quantization_bit: 4\ndeepspeed: a")), deepspeed())) == []
    )


def test_a_deprecated_name_is_replaced() -> None:
    setup = deepspeed(None, {"stage3_gather_fp16_weights_on_model_save": True})
    finding = only(findings, setup, "deepspeed-deprecated-key")
    assert finding.severity == "note"


def test_a_comment_in_json_is_no_key() -> None:
    assert rules(findings, deepspeed({"_comment": "for two nodes"})) == []


@pytest.mark.parametrize(
    ("start", "kind", "expected"),
    [
        ("accelerate launch --config_file acc.yaml src/train.py", "FSDP", ["deepspeed-beside-fsdp"]),
        ("accelerate launch --config_file acc.yaml src/train.py", "MULTI_GPU", []),
        ("torchrun --nproc_per_node 8 src/train.py", "FSDP", []),
    ],
)
def test_deepspeed_goes_before_fsdp_under_accelerate(start: str, kind: str, expected: list[str]) -> None:
    accelerate = f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nmixed_precision: bf16\n"
    trainer = with_lines(FULL, "deepspeed: ds.json")
    setup = setup_of(f"{start} train.yaml\n", train_yaml=trainer, acc_yaml=accelerate, ds_json=json.dumps(AUTO))
    assert rules(findings, setup) == expected
