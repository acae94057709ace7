"""train.yaml for `swift sft`."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_30B, QWEN3_VL_8B, V100
from tests.trainers.swift.plans import files_for, values_for
from topoplan.errors import InputError, LayoutError
from topoplan.layout.layout import Recompute
from topoplan.trainers.swift.arguments import arguments_of

FULL = Recompute(granularity="full")
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-lora": {"job": {"finetuning": "lora"}},
    "ddp-qlora": {"job": {"finetuning": "qlora"}},
    "ddp-pure": {"job": {"pure_bf16": True}},
    "zero1": {"backend": "deepspeed", "zero_stage": 1},
    "zero2-8bit": {"backend": "deepspeed", "zero_stage": 2, "job": {"optimizer": "adamw_8bit"}},
    "zero3": {"backend": "deepspeed", "recompute": FULL},
    "zero3-offload": {"backend": "deepspeed", "offload_optimizer": True, "offload_param": True},
    "zero3-qlora": {"backend": "deepspeed", "job": {"finetuning": "qlora", "quantization_bit": 4}},
    "zero2-freeze": {"backend": "deepspeed", "zero_stage": 2, "job": {"finetuning": "freeze"}},
    "fsdp2": {"backend": "fsdp2", "recompute": FULL},
    "fsdp2-offload": {"backend": "fsdp2", "offload": True},
    "fsdp2-qlora": {"backend": "fsdp2", "job": {"finetuning": "qlora"}},
    "ulysses": {"backend": "deepspeed", "ulysses": 4},
    "liger": {"backend": "fsdp2", "fused_linear_cross_entropy": True},
    "vision": {"backend": "deepspeed", "model": QWEN3_VL_8B},
    "moe": {"backend": "deepspeed", "model": QWEN3_30B},
    "pretraining": {"job": {"stage": "pt", "packing": True}},
    "fp16": {"cluster": replace(CLUSTER, gpu=V100), "job": {"precision": "fp16", "packing": False}},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_key_is_an_argument_of_the_command(case: str) -> None:
    assert set(values_for(**CASES[case])) <= set(arguments_of("swift sft").types)


@pytest.mark.parametrize(
    ("case", "dtype", "bf16"),
    [
        ("ddp", "float32", True),
        ("ddp-lora", "bfloat16", True),
        ("ddp-pure", "bfloat16", False),
        ("zero3", "bfloat16", True),
        ("fsdp2", "bfloat16", True),
        ("fp16", "float32", False),
    ],
)
def test_weights_are_loaded_in_the_type_that_they_are_trained_from(case: str, dtype: str, bf16: bool) -> None:
    values = values_for(**CASES[case])
    assert values["torch_dtype"] == dtype
    assert values["bf16"] is bf16
    assert values["fp16"] is (case == "fp16")


def test_gradient_checkpointing_is_said_either_way() -> None:
    # Enabled by default; with FSDP2 it is set in the separate file.
    assert values_for(recompute=FULL)["gradient_checkpointing"] is True
    assert values_for()["gradient_checkpointing"] is False
    for recompute in (FULL, Recompute()):
        files = files_for(backend="fsdp2", recompute=recompute)
        assert "gradient_checkpointing: false" in files["train.yaml"]
        config = json.loads(files["fsdp.json"])["fsdp_config"]
        assert config["activation_checkpointing"] is (recompute == FULL)


def test_adapters_and_quantized_weights_are_those_of_the_job() -> None:
    values = values_for(job={"finetuning": "lora", "lora_rank": 16, "lora_target": ("q_proj", "v_proj")})
    assert (values["tuner_type"], values["lora_rank"], values["lora_alpha"]) == ("lora", 16, 64)
    assert values["target_modules"] == ["q_proj", "v_proj"]
    assert "quant_method" not in values
    values = values_for(backend="deepspeed", job={"finetuning": "qlora"})
    assert (values["tuner_type"], values["quant_method"], values["quant_bits"]) == ("lora", "bnb", 4)
    assert values["target_modules"] == ["all-linear"]
    assert values["bnb_4bit_quant_storage"] == "bfloat16"
    assert "bnb_4bit_quant_storage" not in values_for(job={"finetuning": "qlora"})
    assert values_for(job={"finetuning": "qlora", "quantization_bit": 8})["quant_bits"] == 8


@pytest.mark.parametrize(("count", "numbers"), [(2, "34|35"), (-3, "0|1|2")])
def test_freezing_leaves_the_first_or_the_last_layers(count: int, numbers: str) -> None:
    job = {"finetuning": "freeze", "freeze_trainable_layers": count}
    values = values_for(backend="fsdp2", job=job)
    assert values["freeze_parameters_ratio"] == 1.0
    assert values["trainable_parameters_regex"] == rf"^model\.layers\.(?:{numbers})\."
    assert values["tuner_type"] == "full"


def test_the_parts_of_a_vision_language_model_are_frozen_as_the_job_says() -> None:
    values = values_for(model=QWEN3_VL_8B, job={"freeze_vision_tower": False, "image_max_pixels": 1000})
    assert (values["freeze_vit"], values["freeze_aligner"], values["freeze_llm"]) == (False, True, False)
    assert values["max_pixels"] == 1000
    assert values["truncation_strategy"] == "delete"
    assert "freeze_vit" not in values_for()


def test_keys_of_the_user_win_or_are_added() -> None:
    trainer = {"dataset": ["a.jsonl", "b.jsonl"], "save_steps": 7, "system": "$(x) 'ü'", "output_dir": "/o"}
    values = values_for(job={"trainer": trainer})
    assert {key: values[key] for key in trainer} == trainer


def test_nothing_is_written_that_ms_swift_refuses() -> None:
    with pytest.raises(InputError, match="stage dpo"):
        files_for(job={"stage": "dpo"})


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"train_type": "lora"}, "write tuner_type"),
        ({"cutoff_len": 1}, "set job.seq_len"),
        ({"max_length": 1}, "set job.seq_len and leave max_length out"),
        ({"gradient_checkpointing": True}, "leave it out, or ask for it under job.pin"),
        ({"sequence_parallel_size": 2}, "the plan leaves it out"),
        ({"deepspeed": "zero3"}, "the plan leaves it out"),
        ({"save_stepz": 1}, "did you mean"),
        ({"micro_batch_size": 1}, "one of `megatron sft`"),
        ({"hub_token": "abc"}, "never written to a file"),
        ({"truncation_strategy": "middle"}, "expected one of"),
        ({"dataset_num_proc": "many"}, "a whole number"),
    ],
)
def test_keys_of_the_user_that_are_wrong_or_contradict_the_plan_are_refused(
    trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as error:
        files_for(job={"trainer": trainer})
    assert message in str(error.value)
    assert "abc" not in str(error.value)


def test_what_may_surprise_is_told() -> None:
    readme = files_for(job={"dataset": "identity", "template": "qwen3"})["README.md"]
    assert "knows no data set identity" in readme
    assert "template qwen3 is a name of LLaMA-Factory's" in readme
    readme = files_for(model=QWEN3_30B, backend="deepspeed", job={"finetuning": "lora"})["README.md"]
    assert "experts get no adapters" in readme
    readme = files_for(job={"trainer": {"eval_strategy": "steps"}})["README.md"]
    assert "eval_strategy has no effect" in readme.replace("\\", "")


def test_fsdp2_reduces_gradients_after_every_micro_batch() -> None:
    # As predicted; by default, transformers would accumulate unsharded gradients on each GPU.
    values = values_for(backend="fsdp2")
    assert values["gradient_accumulation_steps"] > 1
    sync = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert values["accelerator_config"] == {"dispatch_batches": False, **sync}
    assert "accelerator_config" not in values_for(backend="deepspeed")
    with pytest.raises(LayoutError, match="accelerator_config"):
        values_for(backend="fsdp2", job={"trainer": {"accelerator_config": {"split_batches": True}}})
    own = {"accelerator_config": {"split_batches": True}}
    assert values_for(job={"trainer": own})["accelerator_config"] == own["accelerator_config"]
