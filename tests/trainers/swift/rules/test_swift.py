from __future__ import annotations

from typing import Any

import pytest

from tests.reading.setups import fixed, make_command, make_setup, only, rules
from topoplan.trainers.swift.rules.swift import findings

SFT: dict[str, Any] = {
    "model": "Qwen/Qwen3-30B-A3B-Thinking-2507",
    "tuner_type": "full",
    "torch_dtype": "bfloat16",
    "dataset": "liucong/Chinese-DeepSeek-R1-Distill-data-110k#1000",
    "max_length": "4096",
    "num_train_epochs": "3",
    "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "8",
    "learning_rate": "1e-5",
    "warmup_ratio": "0.05",
    "save_steps": "100",
    "save_total_limit": "2",
    "logging_steps": "5",
    "deepspeed": "zero3",
    "output_dir": "output",
}
MEGATRON: dict[str, Any] = {
    "model": "Qwen/Qwen3-30B-A3B",
    "tuner_type": "full",
    "dataset": "a.jsonl",
    "tensor_model_parallel_size": "2",
    "sequence_parallel": "true",
    "expert_model_parallel_size": "4",
    "micro_batch_size": "1",
    "global_batch_size": "16",
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": "1",
    "lr": "1e-5",
}


def swift(changes: dict[str, Any]) -> list[str]:
    arguments = {key: value for key, value in {**SFT, **changes}.items() if value is not None}
    return rules(findings, make_command(arguments))


def megatron(changes: dict[str, Any]) -> list[str]:
    arguments = {key: value for key, value in {**MEGATRON, **changes}.items() if value is not None}
    return rules(findings, make_command(arguments, "swift-megatron", program="megatron sft"))


def test_right_commands_give_nothing() -> None:
    assert swift({}) == []
    assert megatron({}) == []


def test_an_argument_of_version_3_gets_its_name_of_today() -> None:
    command = make_command({"model": "a", "train_type": "full", "max_length": "4096"})
    finding = only(findings, command, "swift-renamed-argument")
    assert (finding.severity, finding.line) == ("error", 3)
    assert "    --tuner_type full \\" in fixed(finding)
    old = make_command({"load": "a", "save_interval": "10", "lr": "1e-5"}, "swift-megatron")
    assert rules(findings, old) == ["swift-renamed-argument"] * 2


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"learnin_rate": "1e-5"}, "swift-unknown-argument"),
        ({"micro_batch_size": "1"}, "swift-unknown-argument"),
        ({"lora_modules": "a"}, "swift-unknown-argument"),
        ({"torch_dtype": "bf16"}, "swift-wrong-value"),
        ({"max_length": "long"}, "swift-wrong-value"),
        ({"strict": "perhaps"}, "swift-wrong-value"),
        ({"deepspeed": "zero2_offloading"}, "swift-unknown-preset"),
        ({"fsdp": "fsdp2"}, "swift-deepspeed-and-fsdp"),
        ({"device_map": "auto"}, "swift-deepspeed-and-device-map"),
        ({"warmup_steps": "10"}, "swift-two-warmups"),
        ({"warmup_ratio": "5"}, "swift-warmup-ratio"),
        ({"packing": "true"}, "swift-packing-without-flash-attention"),
        ({"packing": "true", "attn_impl": "sdpa"}, "swift-packing-without-flash-attention"),
        ({"packing": "true", "attn_impl": "flash_attn", "lazy_tokenize": "true"}, "swift-packing-and-lazy"),
        ({"fp16": "true", "bf16": "true"}, "swift-two-precisions"),
        ({"learning_rate": "1e-3"}, "swift-learning-rate"),
        ({"lora_rank": "8"}, "swift-ignored-argument"),
        ({"eval_steps": "50"}, "swift-evaluates-nothing"),
        ({"eval_strategy": "steps", "eval_steps": "50"}, "swift-evaluates-nothing"),
        (
            {"split_dataset_ratio": "0.1", "eval_steps": "30", "load_best_model_at_end": "true"},
            "swift-best-model-steps",
        ),
        ({"hub_token": "secret"}, "swift-secret"),
    ],
)
def test_a_mistake_is_found_and_nothing_else(arguments: dict[str, Any], rule: str) -> None:
    assert swift(arguments) == [rule]


@pytest.mark.parametrize(
    "arguments",
    [
        {"deepspeed": "ds_config.json"},
        {"deepspeed": '{"zero_optimization": {"stage": 2}}'},
        {"eval_strategy": "no"},
        {"split_dataset_ratio": "0.1", "eval_steps": "50"},
        {"val_dataset": "b.jsonl", "eval_steps": "50"},
        {"packing": "true", "attn_impl": "flash_attention_2"},
        {"tuner_type": "lora", "lora_rank": "8", "learning_rate": "1e-4"},
        {"no_packing": None, "gradient_checkpointing": "true"},
        {"max_length": "$LENGTH"},
        {"per_device_train_batch": "1", "per_device_train_batch_size": None},  # argparse takes the beginning
        {"overwrite_output_dir": "true"},  # transformers 4 has it
    ],
)
def test_what_is_right_gives_nothing(arguments: dict[str, Any]) -> None:
    assert swift(arguments) == []


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"sequence_parallel": None}, "swift-sequence-parallel-off"),
        ({"virtual_pipeline_model_parallel_size": "2"}, "swift-interleaving-alone"),
        ({"recompute_num_layers": None}, "swift-recompute-incomplete"),
        ({"recompute_granularity": "selective"}, "swift-recompute-contradiction"),
        ({"micro_batch_size": "3"}, "swift-batch"),
        ({"expert_model_parallel_size": "3"}, "swift-experts"),
        ({"model": "Qwen/Qwen3-8B"}, "swift-experts"),
        ({"deepspeed": "zero2"}, "swift-unknown-argument"),
        ({"num_layers_per_virtual_pipeline_stage": "2"}, "swift-unknown-argument"),
    ],
)
def test_a_mistake_with_megatron_is_found_and_nothing_else(arguments: dict[str, Any], rule: str) -> None:
    assert megatron(arguments) == [rule]


def test_what_came_and_went_with_version_3_is_no_slip_of_the_keyboard() -> None:
    (finding,) = findings(make_command({"load_safetensors": "true"}, "swift-megatron", program="megatron sft"))

    assert finding.what == "--load_safetensors is refused by ms-swift 4; version 3 had it"
    assert finding.remedy == "take it out"


def test_a_secret_is_never_shown() -> None:
    finding = only(findings, make_command({"hub_token": "abcdef"}), "swift-secret")
    assert "abcdef" not in repr((finding.what, finding.why, finding.remedy, finding.edits))


def test_a_yaml_file_of_ms_swift_may_set_the_environment() -> None:
    assert rules(findings, make_setup("ENV:\n  NPROC_PER_NODE: 8\nmodel: a\ntuner_type: lora\n", "swift")) == []
