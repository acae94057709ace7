"""Checkpoints without Megatron."""

from typing import Any

from tests.bundle.samples import QWEN3_8B, make_spec_and_plan
from topoplan.operators.params import parameter_count
from topoplan.trainers.checkpoint_size import CheckpointSize, plain_checkpoint_size


def size(**what: Any) -> CheckpointSize:
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, **what})
    return plain_checkpoint_size(spec, plan.layout, {"save_total_limit": 2, **spec.job.trainer})


def test_full_training_saves_weights_in_the_type_that_they_are_trained_in() -> None:
    count = parameter_count(QWEN3_8B)
    assert (size(backend="ddp").hf_bytes, size(backend="ddp").optimizer_bytes) == (4 * count, 8 * count)
    assert (size(backend="deepspeed").hf_bytes, size(backend="deepspeed").optimizer_bytes) == (2 * count, 14 * count)
    assert (size(backend="fsdp2").hf_bytes, size(backend="fsdp2").optimizer_bytes) == (4 * count, 12 * count)
    pure = size(backend="ddp", job={"pure_bf16": True})
    assert (pure.hf_bytes, pure.optimizer_bytes) == (2 * count, 4 * count)
    assert size(backend="ddp", job={"optimizer": "adamw_8bit"}).optimizer_bytes == 2 * count


def test_lora_saves_adapters_alone() -> None:
    # PEFT's own count for Qwen3-8B at rank 8, all linear layers.
    found = size(backend="ddp", job={"finetuning": "lora"})
    assert (found.hf_bytes, found.optimizer_bytes) == (4 * 21_823_488, 8 * 21_823_488)
    some = size(backend="ddp", job={"finetuning": "lora", "lora_rank": 16, "lora_target": ("q_proj",)})
    assert some.hf_bytes == 4 * 36 * 16 * (4096 + 4096)


def test_what_is_not_saved_takes_nothing() -> None:
    assert size(backend="ddp", job={"trainer": {"save_only_model": True}}).optimizer_bytes == 0
    assert size(backend="ddp").at_once == 3
    assert size(backend="ddp", job={"trainer": {"save_strategy": "no"}}).at_once == 0
