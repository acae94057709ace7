"""train.yaml and the files beside it, for DeepSpeed, FSDP2 and plain data parallelism."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.bundle.samples import CLUSTER, QWEN3_8B, QWEN3_VL_8B, make_spec_and_layout, make_spec_and_plan
from topoplan.errors import LayoutError
from topoplan.layout.layout import Recompute
from topoplan.trainers.llamafactory.key_list import plain_keys
from topoplan.trainers.llamafactory.plain_yaml import plain_trainer_files

WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)
CASES: list[dict[str, Any]] = [
    {"backend": backend, "zero_stage": stage, "job": {"finetuning": finetuning}}
    for backend, stage in (("ddp", 0), ("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 0))
    for finetuning in ("full", "freeze", "lora", "qlora")
    if (backend, finetuning) != ("fsdp2", "qlora")
]


def values(**what: Any) -> dict[str, Any]:
    files = plain_trainer_files(*make_spec_and_layout(**{"model": QWEN3_8B, "cluster": WITH_MEMORY, **what}))
    read: dict[str, Any] = yaml.safe_load(files.text)
    assert read == files.values
    assert read.keys() <= plain_keys().keys()
    return read


@pytest.mark.parametrize("what", CASES, ids=str)
def test_every_key_is_one_of_the_trainer_and_reads_as_it_was_meant(what: dict[str, Any]) -> None:
    read = values(**what)
    assert (read["per_device_train_batch_size"], read["gradient_accumulation_steps"]) == (1, 2)
    assert (read["cutoff_len"], read["bf16"], read["template"]) == (4096, True, "qwen3")
    assert ("deepspeed" in read) == (what["backend"] == "deepspeed")


def test_full_training_writes_nothing_of_adapters() -> None:
    read = values(backend="ddp")
    assert read["finetuning_type"] == "full"
    assert not {key for key in read if key.startswith(("lora", "quantization", "freeze"))}


def test_lora_and_qlora_have_their_rank_and_bits() -> None:
    read = values(backend="ddp", job={"finetuning": "lora", "lora_rank": 64, "lora_target": ("q_proj", "v_proj")})
    assert (read["finetuning_type"], read["lora_rank"], read["lora_target"]) == ("lora", 64, "q_proj,v_proj")
    assert "quantization_bit" not in read
    read = values(backend="ddp", job={"finetuning": "qlora"})
    assert (read["finetuning_type"], read["lora_rank"], read["lora_target"]) == ("lora", 8, "all")
    assert (read["quantization_bit"], read["quantization_method"], read["double_quantization"]) == (4, "bnb", True)
    assert "double_quantization" not in values(backend="ddp", job={"finetuning": "qlora", "quantization_bit": 8})


def test_freezing_chooses_layers_and_parts_of_vision_models() -> None:
    read = values(backend="ddp", model=QWEN3_VL_8B, job={"finetuning": "freeze", "freeze_trainable_layers": -3})
    assert (read["finetuning_type"], read["freeze_trainable_layers"]) == ("freeze", -3)
    assert (read["freeze_vision_tower"], read["freeze_language_model"]) == (True, False)


def test_numbers_and_optimizer_follow_the_job() -> None:
    read = values(backend="fsdp2", job={"pure_bf16": True})
    assert read["pure_bf16"] is True
    assert "bf16" not in read
    assert values(backend="ddp", job={"precision": "fp16"})["fp16"] is True
    assert values(backend="ddp")["optim"] == "adamw_torch_fused"
    assert values(backend="ddp", job={"optimizer": "adamw_8bit"})["optim"] == "adamw_8bit"


def test_gradient_checkpointing_and_liger_follow_the_layout() -> None:
    assert values(backend="ddp")["disable_gradient_checkpointing"] is True
    read = values(backend="ddp", recompute=Recompute(granularity="full"), fused_linear_cross_entropy=True)
    assert (read["disable_gradient_checkpointing"], read["enable_liger_kernel"]) == (False, True)
    assert "enable_liger_kernel" not in values(backend="ddp")


def test_the_last_batch_of_an_epoch_is_a_step_too() -> None:
    job = {"samples": 6401, "epochs": 2.0}
    text = plain_trainer_files(*make_spec_and_layout(model=QWEN3_8B, backend="ddp", job=job)).text
    assert "3% of 202 steps" in text


def test_what_stands_in_the_file_beside_is_a_part_of_the_runs_name() -> None:
    def run(**what: Any) -> str:
        spec, plan = make_spec_and_plan(model=QWEN3_8B, cluster=WITH_MEMORY, backend="deepspeed", **what)
        return plain_trainer_files(spec, plan.layout).run_name.rpartition("-")[2]

    assert run(zero_stage=3) == run(zero_stage=3) != run(zero_stage=2)
    assert run(zero_stage=3, offload_optimizer=True) != run(zero_stage=3)


def test_keys_of_the_user_take_the_place_of_ours_or_stand_at_the_end() -> None:
    read = values(backend="ddp", job={"trainer": {"logging_steps": 5, "lora_alpha": 4, "output_dir": "/ckpt"}})
    assert (read["logging_steps"], read["lora_alpha"], read["output_dir"]) == (5, 4, "/ckpt")


def test_whoever_evaluates_by_steps_does_so_as_often_as_weights_are_saved() -> None:
    read = values(backend="ddp", job={"trainer": {"eval_strategy": "steps", "val_size": 0.1}})
    assert read["eval_steps"] == read["save_steps"]
    own = {"eval_strategy": "steps", "val_size": 0.1, "eval_steps": 50}
    assert values(backend="ddp", job={"trainer": own})["eval_steps"] == 50


def test_stages_have_their_packing() -> None:
    assert "packing" not in values(backend="ddp", job={"stage": "dpo"})
    assert "packing" not in values(backend="ddp", job={"stage": "pt"})
    assert values(backend="ddp", job={"stage": "pt", "packing": False})["packing"] is False


def test_fsdp2_reduces_gradients_after_every_micro_batch() -> None:
    # As predicted; by default, transformers would accumulate unsharded gradients on each GPU.
    sync = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert values(backend="fsdp2")["accelerator_config"] == sync
    assert "accelerator_config" not in values(backend="fsdp2", gradient_accumulation_steps=1)
    assert "accelerator_config" not in values(backend="deepspeed", zero_stage=3)
    own = {**sync, "even_batches": False}
    assert values(backend="fsdp2", job={"trainer": {"accelerator_config": own}})["accelerator_config"] == own
    with pytest.raises(LayoutError, match="accelerator_config without sync_each_batch true"):
        values(backend="fsdp2", job={"trainer": {"accelerator_config": {"even_batches": False}}})
