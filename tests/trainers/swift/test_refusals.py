"""ms-swift refuses exactly what it cannot do."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import B200, CLUSTER, DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, V100
from tests.bundle.samples import make_spec_and_plan as make
from topoplan.errors import InputError, LayoutError, ModelError, SpecError
from topoplan.layout.layout import Recompute
from topoplan.specs.known import model as catalog_model
from topoplan.specs.model import LinearAttention
from topoplan.trainers.refusal import refuse
from topoplan.trainers.swift.refusals import (
    LIGER_MODEL_TYPES,
    MEGATRON_MODEL_TYPES,
    megatron_refusals,
    sharded_refusals,
)

WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)
ON_V100 = replace(WITH_MEMORY, gpu=V100)
ON_B200 = replace(WITH_MEMORY, gpu=B200)


def sharded(**what: Any) -> None:
    spec, plan = make(**{"cluster": WITH_MEMORY, "model": QWEN3_8B, "backend": "ddp", **what})
    refuse(sharded_refusals(spec, plan.layout))


def megatron(**what: Any) -> None:
    spec, plan = make(**{"cluster": WITH_MEMORY, "model": QWEN3_8B, "backend": "megatron", **what})
    refuse(megatron_refusals(spec, plan.layout))


ZERO: dict[str, Any] = {"backend": "deepspeed"}
FSDP2: dict[str, Any] = {"backend": "fsdp2"}
SHARDED_TAKEN: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3 with all offload": {**ZERO, "offload_optimizer": True, "offload_param": True},
    "fsdp2 with offload": {**FSDP2, "offload": True},
    "fp16": {"cluster": ON_V100, "job": {"precision": "fp16", "packing": False}},
    "pure bf16": {**FSDP2, "job": {"pure_bf16": True}},
    "freeze": {**ZERO, "job": {"finetuning": "freeze"}},
    "freeze in one dtype": {"job": {"finetuning": "freeze", "pure_bf16": True}},
    "8-bit moments": {**ZERO, "zero_stage": 2, "job": {"optimizer": "adamw_8bit"}},
    "8-bit weights": {**ZERO, "zero_stage": 2, "job": {"finetuning": "qlora", "quantization_bit": 8}},
    "ulysses": {**ZERO, "ulysses": 8},
    "liger": {**FSDP2, "fused_linear_cross_entropy": True},
    "pretraining": {"job": {"stage": "pt"}},
}


@pytest.mark.parametrize("case", SHARDED_TAKEN, ids=str)
def test_what_swift_sft_can_do_is_taken(case: str) -> None:
    sharded(**SHARDED_TAKEN[case])


@pytest.mark.parametrize(
    ("what", "kind", "where", "message"),
    [
        ({"job": {"stage": "dpo"}}, SpecError, "job.stage", "no `rlhf` command"),
        ({"job": {"precision": "fp8"}}, SpecError, "job.precision", "fp8 is for `megatron sft`"),
        ({"cluster": ON_V100, "job": {"precision": "fp16"}}, SpecError, "job.packing", "no kernels for v100"),
        ({"job": {"pure_bf16": True, "precision": "fp16"}}, SpecError, "job.pure_bf16", "with precision fp16"),
        ({"job": {"finetuning": "freeze"}}, SpecError, "job.finetuning", "in one dtype"),
        ({**FSDP2, "job": {"optimizer": "adamw_8bit"}}, SpecError, "job.optimizer", "sharded tensors"),
        (
            {**ZERO, "offload_optimizer": True, "job": {"optimizer": "adamw_8bit"}},
            LayoutError,
            "layout.offload_optimizer",
            "for the GPU alone",
        ),
        ({"job": {"quantization_bit": 4}}, SpecError, "job.quantization_bit", "only LoRA trains beside"),
        ({**ZERO, "cluster": CLUSTER, "offload_optimizer": True}, SpecError, "host_memory", "needs host memory"),
        ({**FSDP2, "cluster": CLUSTER, "offload": True}, SpecError, "host_memory", "needs host memory"),
        (
            {**FSDP2, "fused_linear_cross_entropy": True, "model": replace(QWEN3_8B, model_type="mimo")},
            ModelError,
            "layout.fused_linear_cross_entropy",
            "no kernels for 'mimo'",
        ),
        ({"recompute": Recompute(granularity="selective")}, LayoutError, "", "none or full"),
        ({**FSDP2, "sharding": "hybrid"}, LayoutError, "layout.sharding", "over all ranks"),
        ({"cp": 2, "dp": 16}, LayoutError, "layout.cp", "ring attention"),
        ({**ZERO, "ulysses": 8, "model": QWEN3_30B}, LayoutError, "layout.ulysses", "pin ulysses=4"),
        (
            {**ZERO, "ulysses": 2, "fused_linear_cross_entropy": True},
            LayoutError,
            "layout.fused_linear_cross_entropy",
            "from whole logits",
        ),
    ],
)
def test_what_swift_sft_refuses_or_does_otherwise_is_refused(
    what: dict[str, Any], kind: type[InputError], where: str, message: str
) -> None:
    with pytest.raises(kind) as error:
        sharded(**what)
    assert message in str(error.value)
    assert where in str(error.value)


def test_linear_attention_is_not_split_by_heads() -> None:
    model = catalog_model("Qwen3-Next-80B-A3B-Instruct")
    assert any(isinstance(layer.attention, LinearAttention) for layer in model.layers)
    with pytest.raises(LayoutError, match="linear attention"):
        sharded(**ZERO, ulysses=2, model=model)


def test_heads_of_latent_attention_are_all_of_them() -> None:
    sharded(**ZERO, ulysses=8, model=DEEPSEEK)


MEGATRON: dict[str, Any] = {"backend": "megatron"}
LORA: dict[str, Any] = {"finetuning": "lora"}
LINEAR = catalog_model("Qwen3-Next-80B-A3B-Instruct")
SEEN = {"freeze_vision_tower": False}
FROZEN = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True}
MEGATRON_TAKEN: dict[str, dict[str, Any]] = {
    "adapters": {"job": LORA, **MEGATRON},
    "adapters of experts": {"job": LORA, "model": QWEN3_30B, "tp": 2, "ep": 4, **MEGATRON},
    "adapters of a language model that sees": {"job": LORA | FROZEN, "model": QWEN3_VL_8B, **MEGATRON},
    "adapters of some layers": {"job": LORA | {"lora_target": ("linear_qkv", "linear_fc2")}, **MEGATRON},
    "adapters of token prediction": {"job": LORA | {"lora_target": ("eh_proj",), "mtp_num_layers": 1}, **MEGATRON},
    "dense": {},
    "experts": {"model": QWEN3_30B, "tp": 2, "ep": 4},
    "images": {"model": QWEN3_VL_8B},
    "fp16 gradients": {"job": {"precision": "fp16"}, "grad_reduce_in_fp32": False},
    "fp8": {"job": {"precision": "fp8"}},
    "mxfp8": {"cluster": ON_B200, "job": {"precision": "mxfp8"}},
    "nvfp4": {"cluster": ON_B200, "job": {"precision": "nvfp4"}},
    "half an epoch of known samples": {"job": {"epochs": 0.5}},
    "whole epochs of unknown ones": {"job": {"samples": None}},
    "just one step": {"job": {"samples": 64, "epochs": 1.0}},
}


@pytest.mark.parametrize("case", MEGATRON_TAKEN, ids=str)
def test_what_megatron_sft_can_do_is_taken(case: str) -> None:
    megatron(**MEGATRON_TAKEN[case])


@pytest.mark.parametrize(
    ("what", "kind", "where", "message"),
    [
        ({"job": {"stage": "rm"}}, SpecError, "job.stage", "no `rlhf` command"),
        ({"model": replace(QWEN3_8B, model_type="gemma9")}, ModelError, "Qwen3-8B", "does not build 'gemma9'"),
        ({"cluster": ON_V100, "job": {"precision": "fp16"}}, SpecError, "gpu", "no kernels for v100"),
        ({"job": {"finetuning": "qlora"}, **MEGATRON}, SpecError, "job.finetuning", "trainer has full and lora"),
        ({"job": {"finetuning": "freeze"}, **MEGATRON}, SpecError, "job.finetuning", "trainer has full and lora"),
        ({"job": LORA, "backend": "mca"}, SpecError, "job.finetuning", "trains all weights"),
        ({"job": LORA | {"precision": "fp8"}, **MEGATRON}, SpecError, "job.finetuning", "as narrow as a rank"),
        (
            {"job": LORA | SEEN, "model": QWEN3_VL_8B, **MEGATRON},
            SpecError,
            "job.finetuning",
            "the language model alone",
        ),
        ({"job": LORA | {"lora_target": ("q_proj",)}, **MEGATRON}, SpecError, "job.lora_target", "called q_proj"),
        (
            {"job": LORA | {"lora_target": ("eh_proj",)}, **MEGATRON},
            SpecError,
            "job.lora_target",
            "or some of linear_qkv",
        ),
        ({"job": {"pure_bf16": True}}, SpecError, "job", "no such mode"),
        ({"job": {"optimizer": "adamw_8bit"}}, SpecError, "job", "no such mode"),
        ({"job": {"precision": "mxfp8"}}, SpecError, "job.precision", "not trained on h100"),
        ({"job": {"precision": "nvfp4"}}, SpecError, "job.precision", "not trained on h100"),
        ({"grad_reduce_in_fp32": False}, LayoutError, "layout.grad_reduce_in_fp32", "sums gradients in fp32"),
        ({"job": {"epochs": 0.5, "samples": None}}, SpecError, "job.epochs", "needs job.samples"),
        ({"job": {"samples": 63, "epochs": 1.0}}, SpecError, "job.samples", "less than one step of 64"),
    ],
)
def test_what_megatron_sft_refuses_or_does_otherwise_is_refused(
    what: dict[str, Any], kind: type[InputError], where: str, message: str
) -> None:
    with pytest.raises(kind) as error:
        megatron(**what)
    assert message in str(error.value)
    assert where in str(error.value)


def test_the_lists_of_model_types_hold_the_families_of_the_catalogue() -> None:
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "deepseek_v3"} <= MEGATRON_MODEL_TYPES
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl"} <= LIGER_MODEL_TYPES
    assert "gemma9" not in MEGATRON_MODEL_TYPES | LIGER_MODEL_TYPES
