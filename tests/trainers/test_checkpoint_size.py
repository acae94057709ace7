from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.operators.params import parameter_count
from topoplan.trainers.checkpoint_size import CheckpointSize, plain_checkpoint_size
from topoplan.trainers.llamafactory.mca import checkpoint_size, trainer_file


def size(**what: Any) -> CheckpointSize:
    spec, plan = make_spec_and_plan(**what)
    return checkpoint_size(spec, plan.layout, trainer_file(spec, plan.layout).values)


def test_a_dense_checkpoint_has_the_weights_twice_and_twelve_bytes_of_state_a_parameter() -> None:
    count = parameter_count(QWEN3_8B)
    for layout in ({}, {"tp": 8}, {"pp": 4, "tp": 1}):
        found = size(model=QWEN3_8B, **layout)
        assert (found.megatron_bytes, found.hf_bytes, found.optimizer_bytes) == (2 * count, 2 * count, 12 * count)
        assert found.final_bytes == 4 * count
        assert found.total_bytes == 16 * count


def test_what_is_shared_by_expert_ranks_is_saved_by_each_of_them_unless_the_format_is_torch_dist() -> None:
    count = parameter_count(QWEN3_30B)
    expert = 48 * 128 * 3 * 2048 * 768
    legacy = size(model=QWEN3_30B, tp=1, ep=8)
    assert legacy.megatron_bytes == 2 * (expert + 8 * (count - expert))
    assert legacy.hf_bytes == 2 * count
    assert legacy.optimizer_bytes == 12 * count
    assert size(model=QWEN3_30B, tp=2, ep=8).megatron_bytes == 2 * count
    asked = size(model=QWEN3_30B, tp=1, ep=8, job={"trainer": {"ckpt_format": "torch_dist"}})
    assert asked.megatron_bytes == 2 * count
    whole = size(model=QWEN3_30B, tp=1, ep=8, distributed_optimizer=False, overlap_param_gather=False)
    assert whole.optimizer_bytes == 12 * (expert + 8 * (count - expert))


def test_frozen_weights_have_no_state() -> None:
    vision = QWEN3_VL_8B.vision
    frozen, trained = size(), size(job={"freeze_vision_tower": False, "freeze_multi_modal_projector": False})
    assert frozen.hf_bytes == trained.hf_bytes
    parts = vision.encoder_parameters + vision.projector_parameters
    assert trained.optimizer_bytes - frozen.optimizer_bytes == 12 * parts


@pytest.mark.parametrize(
    ("keys", "weights", "hf", "state", "at_once"),
    [
        ({}, 2, 2, 12, 3),
        ({"save_hf_model": False}, 2, 0, 12, 3),
        ({"save_only_model": True}, 0, 2, 0, 3),
        ({"save_only_model": True, "save_hf_model": False}, 2, 0, 0, 3),
        ({"optimizer": "sgd"}, 2, 2, 8, 3),
        ({"save_total_limit": 5}, 2, 2, 12, 6),
        ({"save_total_limit": None}, 2, 2, 12, None),
        ({"save_strategy": "no"}, 2, 2, 12, 0),
    ],
)
def test_the_keys_of_the_user_count(keys: dict[str, Any], weights: int, hf: int, state: int, at_once: int) -> None:
    gathers = keys.get("save_strategy") != "no"
    found = size(model=QWEN3_8B, overlap_param_gather=gathers, job={"trainer": keys})
    count = parameter_count(QWEN3_8B)
    assert found.megatron_bytes == weights * count
    assert found.hf_bytes == hf * count
    assert found.optimizer_bytes == state * count
    assert found.at_once == at_once


def test_token_prediction_is_saved_too() -> None:
    wide = replace(CLUSTER, nodes=16)
    without = size(model=DEEPSEEK, cluster=wide, tp=1, ep=8)
    assert size(model=DEEPSEEK, cluster=wide, tp=1, ep=8, job={"mtp_num_layers": 1}).hf_bytes > without.hf_bytes


def test_the_readme_says_what_a_checkpoint_takes() -> None:
    def readme(**keys: Any) -> str:
        gathers = keys.get("save_strategy") != "no"
        what = {"model": QWEN3_8B, "overlap_param_gather": gathers, "job": {"trainer": keys}}
        return generate(*make_spec_and_plan(**what))["README.md"]

    assert (
        "A checkpoint takes 131 GB: weights for Megatron 16.4 GB, for Hugging Face 16.4 GB, optimizer state 98.3 GB.\n"
        "   Up to 3 exist at a time, plus 32.8 GB of weights at the end."
    ) in readme()
    assert "All of them are kept, plus" in readme(save_total_limit=None)
    assert "The weights at the end take 32.8 GB." in readme(save_strategy="no")
    assert "optimizer state" not in readme(save_only_model=True)


def plain_size(**what: Any) -> CheckpointSize:
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, **what})
    return plain_checkpoint_size(spec, plan.layout, {"save_total_limit": 2, **spec.job.trainer})


def test_full_training_saves_weights_in_the_type_that_they_are_trained_in() -> None:
    count = parameter_count(QWEN3_8B)
    assert (plain_size(backend="ddp").hf_bytes, plain_size(backend="ddp").optimizer_bytes) == (4 * count, 8 * count)
    assert (plain_size(backend="deepspeed").hf_bytes, plain_size(backend="deepspeed").optimizer_bytes) == (
        2 * count,
        14 * count,
    )
    assert (plain_size(backend="fsdp2").hf_bytes, plain_size(backend="fsdp2").optimizer_bytes) == (
        4 * count,
        12 * count,
    )
    pure = plain_size(backend="ddp", job={"pure_bf16": True})
    assert (pure.hf_bytes, pure.optimizer_bytes) == (2 * count, 4 * count)
    assert plain_size(backend="ddp", job={"optimizer": "adamw_8bit"}).optimizer_bytes == 2 * count


def test_lora_saves_adapters_alone() -> None:
    # PEFT's own count for Qwen3-8B at rank 8, all linear layers.
    found = plain_size(backend="ddp", job={"finetuning": "lora"})
    assert (found.hf_bytes, found.optimizer_bytes) == (4 * 21_823_488, 8 * 21_823_488)
    some = plain_size(backend="ddp", job={"finetuning": "lora", "lora_rank": 16, "lora_target": ("q_proj",)})
    assert some.hf_bytes == 4 * 36 * 16 * (4096 + 4096)


def test_what_is_not_saved_takes_nothing() -> None:
    assert plain_size(backend="ddp", job={"trainer": {"save_only_model": True}}).optimizer_bytes == 0
    assert plain_size(backend="ddp").at_once == 3
    assert plain_size(backend="ddp", job={"trainer": {"save_strategy": "no"}}).at_once == 0
