"""What LLaMA-Factory would refuse or ignore is refused before anything is written."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_8B, QWEN3_VL_8B, make_spec_and_plan
from topoplan.errors import InputError, LayoutError, ModelError, SpecError
from topoplan.layout.layout import Recompute
from topoplan.trainers.llamafactory.plain_refusals import refusals
from topoplan.trainers.refusal import refuse

WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)


def check(**what: Any) -> None:
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, "cluster": WITH_MEMORY, **what})
    refuse(refusals(spec, plan.layout))


@pytest.mark.parametrize(
    "what",
    [
        {"backend": "ddp"},
        {"backend": "ddp", "job": {"finetuning": "qlora", "quantization_bit": 8}},
        {"backend": "ddp", "job": {"pure_bf16": True, "optimizer": "adamw_8bit"}},
        {"backend": "deepspeed", "zero_stage": 1},
        {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": True},
        {"backend": "deepspeed", "zero_stage": 3, "offload_optimizer": True, "offload_param": True},
        {"backend": "deepspeed", "zero_stage": 3, "job": {"finetuning": "qlora"}},
        {"backend": "deepspeed", "zero_stage": 2, "job": {"optimizer": "adamw_8bit"}},
        {"backend": "fsdp2", "offload": True},
        {"backend": "fsdp2", "job": {"pure_bf16": True}},
        {"backend": "fsdp2", "fused_linear_cross_entropy": True, "recompute": Recompute(granularity="full")},
        {"backend": "ddp", "model": QWEN3_VL_8B, "job": {"finetuning": "freeze"}},
        {"backend": "fsdp2", "job": {"stage": "dpo", "finetuning": "lora"}},
    ],
    ids=str,
)
def test_what_the_trainer_can_do_passes(what: dict[str, Any]) -> None:
    check(**what)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (
            {"backend": "fsdp2", "ulysses": 2},
            LayoutError,
            "splits no sequences; pin ulysses=1, or take another trainer",
        ),
        ({"backend": "deepspeed", "cp": 2}, LayoutError, r"layout\.cp: .*splits no sequences"),
        ({"backend": "fsdp2", "sharding": "hybrid"}, LayoutError, "hybrid sharding: .*pin sharding=full"),
        (
            {"backend": "ddp", "recompute": Recompute(granularity="selective", modules=("mlp",))},
            LayoutError,
            "selective recomputation is Megatron's",
        ),
        ({"backend": "ddp", "job": {"stage": "kto"}}, SpecError, "expected pt, sft or dpo"),
        ({"backend": "ddp", "job": {"precision": "fp8"}}, SpecError, "expected bf16 or fp16"),
        ({"backend": "ddp", "job": {"quantization_bit": 4}}, SpecError, "set finetuning: qlora"),
        ({"backend": "fsdp2", "job": {"finetuning": "qlora"}}, LayoutError, "QLoRA with FSDP2"),
        ({"backend": "ddp", "job": {"pure_bf16": True, "precision": "fp16"}}, SpecError, "leave one of them out"),
        ({"backend": "fsdp2", "job": {"optimizer": "adamw_8bit"}}, SpecError, "adamw_8bit with FSDP2"),
        (
            {"backend": "deepspeed", "offload_optimizer": True, "job": {"optimizer": "adamw_8bit"}},
            SpecError,
            "adamw_8bit with offload_optimizer",
        ),
        ({"backend": "fsdp2", "offload": True, "cluster": CLUSTER}, SpecError, "host_memory: .*expected a size"),
        ({"backend": "deepspeed", "offload_optimizer": True, "cluster": CLUSTER}, SpecError, "host_memory: "),
        ({"backend": "ddp", "fused_linear_cross_entropy": True, "job": {"stage": "dpo"}}, LayoutError, "the logits"),
        ({"backend": "ddp", "fused_linear_cross_entropy": True, "model": QWEN3_VL_8B}, ModelError, "no Liger kernels"),
        (
            {"backend": "ddp", "model": QWEN3_VL_8B, "job": {"finetuning": "freeze", "freeze_vision_tower": False}},
            SpecError,
            "chooses layers by number",
        ),
        ({"backend": "ddp", "model": replace(QWEN3_VL_8B, model_type="mystery_vl")}, ModelError, "freeze none of them"),
    ],
    ids=str,
)
def test_what_it_refuses_or_ignores_is_an_error(what: dict[str, Any], error: type[InputError], message: str) -> None:
    with pytest.raises(error, match=message):
        check(**what)
