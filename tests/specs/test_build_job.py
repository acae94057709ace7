from typing import Any

import pytest

from tests.specs.documents import BOX, spec_of


@pytest.mark.parametrize(
    ("job", "rate"),
    [
        ({}, 2e-5),
        ({"finetuning": "lora"}, 1e-4),
        ({"finetuning": "qlora"}, 1e-4),
        ({"finetuning": "lora", "stage": "dpo"}, 5e-6),
        ({"finetuning": "lora", "learning_rate": 3e-5}, 3e-5),
    ],
)
def test_each_method_has_its_usual_learning_rate(job: dict[str, Any], rate: float) -> None:
    assert spec_of(BOX, **job).job.learning_rate == rate


def test_what_is_left_out_is_what_the_trainers_take() -> None:
    job = spec_of(BOX, finetuning="lora").job
    assert (job.precision, job.stage, job.freeze_vision_tower, job.packing) == ("bf16", "sft", True, False)
    assert (job.lora_rank, job.lora_target, job.quantization_bit) == (None, ("all",), None)
    assert (job.freeze_trainable_layers, job.pure_bf16, job.optimizer) == (2, False, "adamw")
    assert spec_of(BOX, stage="pt").job.packing


def test_keys_of_the_tuner_are_taken_over() -> None:
    keys = {"lora_rank": 32, "lora_target": ("q_proj", "v_proj"), "quantization_bit": 8, "optimizer": "adamw_8bit"}
    job = spec_of(BOX, finetuning="qlora", pure_bf16=True, **keys).job
    assert {key: getattr(job, key) for key in keys} == keys
    assert job.pure_bf16


@pytest.mark.parametrize("count", [1, 36, -1, -36])
def test_all_but_some_layers_are_frozen(count: int) -> None:
    assert spec_of(BOX, finetuning="freeze", freeze_trainable_layers=count).job.freeze_trainable_layers == count


def test_part_of_a_model_may_be_frozen() -> None:
    frozen = {"freeze_language_model": True, "freeze_vision_tower": False}
    assert spec_of(BOX, "Qwen/Qwen3-VL-8B-Instruct", **frozen).job.freeze_language_model
    assert spec_of(BOX, mtp_num_layers=2).job.mtp_num_layers == 2


@pytest.mark.parametrize(
    "pin",
    [
        {"tp": 4},
        {"tp": 4, "pp": 2, "cp": 1, "dp": 4},
        {"ep": 4, "etp": 1, "pp": 2},
        {"dp": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4},
        {"pp": 2, "vpp": 3},
        {"recompute": "full"},
        {"recompute": {"granularity": "selective", "modules": ["core_attn"]}},
        {"sequence_parallel": True},
    ],
)
def test_a_pin_that_some_layout_meets_is_kept(pin: dict[str, Any]) -> None:
    kept = spec_of(BOX, pin=pin).job.pin
    assert kept == ({"recompute": {"granularity": "full"}} if pin.get("recompute") == "full" else pin)


def test_tp_may_span_the_nodes_of_a_rack() -> None:
    rack = {"gpu": "gb200-nvl72-186gb", "nodes": 4, "gpus_per_node": 4}
    assert spec_of(rack, pin={"tp": 8}).job.pin == {"tp": 8}
