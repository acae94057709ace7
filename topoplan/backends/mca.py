"""What LLaMA-Factory's Megatron path (mcore_adapter) can train at all."""

from __future__ import annotations

from topoplan.errors import ModelError, SpecError
from topoplan.specs.model import LinearAttention
from topoplan.specs.spec import Spec

SUPPORTED_MODEL_TYPES = frozenset(
    {
        "deepseek_v3",
        "glm4_moe",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
    }
)
"""MCA_SUPPORTED_MODELS in LLaMA-Factory 0.9.5, `extras/constants.py`."""

FP8_RECIPES = {"hopper": "blockwise", "blackwell": "mxfp8"}
"""GPU architecture -> recipe. mcore_adapter `training_args.py`, fp8_recipe: "Other recipes are not tested yet"."""

MTP_MODEL_TYPES = frozenset({"deepseek_v3", "glm4_moe"})
"""Types whose multi-token-prediction weights the adapter loads under megatron-core 0.16: convert_mtp_name in
`models/deepseek_v3/__init__.py` and `models/glm4_moe/__init__.py`. That of qwen3_5 writes the names of a later
megatron-core (mtp_model_layer), and qwen3_next drops the weights."""


def check_job(spec: Spec) -> None:
    """Raise ModelError or SpecError for a model or a job that no layout would help."""
    model, job, gpu = spec.model, spec.job, spec.cluster.gpu
    where = spec.path or ""
    if model.model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"the MCA trainer does not support model_type {model.model_type!r} ({model.name})",
            where=where,
            expected=f"expected one of {', '.join(sorted(SUPPORTED_MODEL_TYPES))}",
            remedy="`topoplan predict` with backend megatron still predicts it",
        )
    linear_attention = any(isinstance(layer.attention, LinearAttention) for layer in model.layers)
    if gpu.architecture == "volta" and linear_attention:
        # models/qwen3_next and qwen3_5, _get_transformer_layer_spec: only the 'transformer_engine' implementation.
        raise ModelError(
            f"{model.name} needs Transformer Engine, which has no kernels for {gpu.name} (volta)", where=where
        )
    check_precision(spec)
    recipe = FP8_RECIPES.get(gpu.architecture)
    if job.precision not in ("bf16", "fp16", "fp8" if recipe else "bf16", recipe):
        raise SpecError(
            f"the MCA trainer has no {job.precision} recipe for {gpu.name} ({gpu.architecture})",
            where=where,
            expected="expected bf16, fp8 on Hopper, or fp8 or mxfp8 on Blackwell",
        )
    if job.finetuning != "full":
        raise SpecError(
            f"finetuning {job.finetuning!r}: the MCA trainer parses it and trains all weights all the same",
            where=where,
            expected="expected full",
        )
    if job.pure_bf16 or job.optimizer != "adamw":
        what = "pure_bf16" if job.pure_bf16 else f"optimizer {job.optimizer}"
        raise SpecError(f"{what}: Megatron's optimizer has no such mode", where=where, remedy="leave it out")
    check_token_prediction(spec)
    check_preferences(spec)


def check_preferences(spec: Spec) -> None:
    """Raise SpecError for stage dpo on a vision-language model, which ends at the first batch.

    LLaMA-Factory train/mca/workflow.py, _data_collator_wrapper takes the last token off a pair's ids and leaves its
    mask as it is. Transformers' get_rope_index looks up one by the other and raises an IndexError; a batch without
    images gets a dummy one, and ends there too.
    """
    if spec.job.stage == "dpo" and spec.model.vision is not None:
        raise SpecError(
            f"stage dpo of {spec.model.name}: the MCA trainer cuts a pair's ids and not its mask, and then cannot find"
            " the images in it",
            where=spec.path or "",
            expected="expected stage pt or sft for a vision-language model",
        )


def check_token_prediction(spec: Spec) -> None:
    """Raise SpecError for multi-token-prediction layers that the adapter cannot train.

    `training_args.py` has mtp_num_layers at 0, which `McaModelConfig.update_with_args` puts over the checkpoint's
    number: without the key there are none. With it `McaGPTModel._get_mtp_block_spec` builds them, and
    `PretrainedModel.from_pretrained` refuses weights that are missing or left over.
    """
    model, count, where = spec.model, spec.job.mtp_num_layers, spec.path or ""
    if not count:
        return
    if model.model_type not in MTP_MODEL_TYPES:
        raise SpecError(
            f"mtp_num_layers {count}: the MCA trainer loads no multi-token-prediction layers of {model.model_type}",
            where=where,
            expected=f"expected 0, or a model_type of {', '.join(sorted(MTP_MODEL_TYPES))}",
            remedy="`topoplan predict` with backend megatron predicts it",
        )
    if count != model.mtp_layers:
        raise SpecError(
            f"mtp_num_layers {count}: the checkpoint of {model.name} has {model.mtp_layers}, and the MCA trainer"
            " loads all of them or none",
            where=where,
            expected=f"expected 0 or {model.mtp_layers}" if model.mtp_layers else "expected 0",
        )


def check_finetuning(spec: Spec) -> None:
    """Raise SpecError for a job that trains anything but the whole weights."""
    if spec.job.finetuning != "full":
        raise SpecError(
            f"finetuning {spec.job.finetuning!r} is not predicted yet with backends mca and megatron",
            where=spec.path or "",
            expected="expected full",
            remedy="take backend ddp, deepspeed or fsdp2",
        )


def check_precision(spec: Spec) -> None:
    """Raise SpecError when the card lacks the job's precision."""
    gpu, precision = spec.cluster.gpu, spec.job.precision
    if precision == "bf16" and gpu.bf16_flops < gpu.fp16_flops / 2:
        raise SpecError(
            f"{gpu.name} has no bf16 tensor cores", where=spec.path or "", remedy="set precision: fp16 in the job"
        )
    if precision in ("fp8", "mxfp8") and not gpu.fp8_flops:
        raise SpecError(f"{gpu.name} has no fp8 tensor cores", where=spec.path or "", remedy="set precision: bf16")
    if precision == "mxfp8" and gpu.architecture != "blackwell":
        raise SpecError(f"{gpu.name} has no mxfp8; Blackwell does", where=spec.path or "", remedy="set precision: fp8")
    if precision == "nvfp4" and not gpu.fp4_flops:
        raise SpecError(
            f"{gpu.name} has no fp4 tensor cores", where=spec.path or "", remedy="set precision: bf16 or fp8"
        )
