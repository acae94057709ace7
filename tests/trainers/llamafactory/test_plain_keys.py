"""The user's trainer keys for LLaMA-Factory without Megatron."""

from typing import Any

import pytest

from tests.bundle.samples import QWEN3_8B, QWEN3_VL_8B, make_spec_and_plan
from topoplan.errors import InputError, LayoutError, SpecError
from topoplan.trainers.llamafactory.key_list import plain_keys
from topoplan.trainers.llamafactory.plain_keys import fixed_values, plain_user_keys
from topoplan.trainers.llamafactory.plain_yaml import written_keys


def keys(trainer: dict[str, Any], warnings: list[str] | None = None, **what: Any) -> dict[str, Any]:
    what = {"model": QWEN3_8B, "backend": "ddp", **what}
    what["job"] = {**what.get("job", {}), "trainer": trainer}
    spec, plan = make_spec_and_plan(**what)
    return plain_user_keys(spec, plan.layout, written_keys(spec, plan.layout), [] if warnings is None else warnings)


def test_keys_that_the_plan_does_not_decide_pass() -> None:
    given = {"weight_decay": "1e-2", "lora_dropout": 0, "report_to": "wandb", "max_grad_norm": 0.5, "lora_alpha": 32}
    assert keys(given) == {**given, "weight_decay": 0.01, "lora_dropout": 0.0}


def test_keys_that_say_what_the_plan_says_pass() -> None:
    given = {"optim": "adamw_torch", "flash_attn": "fa2", "lora_rank": 8, "disable_gradient_checkpointing": True}
    assert keys(given, job={"finetuning": "lora"}) == given


@pytest.mark.parametrize(
    ("trainer", "error", "message"),
    [
        ({"per_device_train_batch_size": 4}, LayoutError, "is 4, and the plan was made for 1"),
        ({"deepspeed": "mine.json"}, LayoutError, "the plan decides it"),
        ({"fsdp": "full_shard"}, LayoutError, "the plan decides it"),
        ({"gradient_checkpointing": True}, LayoutError, "the plan decides it"),
        ({"enable_liger_kernel": True}, LayoutError, "the plan decides it"),
        ({"use_unsloth": True}, LayoutError, "the plan decides it"),
        ({"flash_attn": "disabled"}, LayoutError, "the plan decides it"),
        ({"finetuning_type": "lora"}, SpecError, r"set job\.finetuning and leave finetuning_type out"),
        ({"optim": "adafactor"}, SpecError, r"set job\.optimizer"),
        ({"quantization_bit": 4}, SpecError, r"set job\.quantization_bit"),
        ({"pure_bf16": True}, SpecError, r"set job\.pure_bf16"),
        ({"tensor_model_parallel_size": 2}, SpecError, "the trainer has no key"),
        ({"hub_token": "x"}, SpecError, "never written"),
        ({"neat_packing": True, "packing": True}, InputError, "packing"),
        ({"eval_strategy": "steps"}, SpecError, "nothing to evaluate on"),
        ({"model_name_or_path": "Qwen/Qwen3-8B"}, SpecError, "is a hub id"),
        ({"resize_vocab": True}, SpecError, "quantized"),
        ({"pissa_init": True}, SpecError, "quantized"),
    ],
    ids=str,
)
def test_other_keys_are_refused(trainer: dict[str, Any], error: type[InputError], message: str) -> None:
    job = {"finetuning": "qlora"} if {"resize_vocab", "pissa_init"} & set(trainer) else {"packing": False}
    with pytest.raises(error, match=message):
        keys(trainer, job=job)


def test_a_ratio_of_warm_up_becomes_steps() -> None:
    assert keys({"warmup_ratio": 0.1}, job={"samples": 6400, "epochs": 1.0}) == {"warmup_steps": 10}


def test_every_key_that_the_plan_decides_is_one_of_the_trainer() -> None:
    for backend in ("ddp", "deepspeed", "fsdp2"):
        for finetuning in ("full", "freeze", "lora", "qlora"):
            spec, plan = make_spec_and_plan(model=QWEN3_VL_8B, backend=backend, job={"finetuning": finetuning})
            assert fixed_values(spec, written_keys(spec, plan.layout)).keys() <= plain_keys().keys()
