"""What LLaMA-Factory's Megatron path (mcore_adapter) can train at all."""

from __future__ import annotations

import math

from topoplan.engines.megatron.rules import sequence_parts
from topoplan.errors import LayoutError, ModelError, SpecError, listed
from topoplan.layout.layout import Layout
from topoplan.operators.padding import is_padded_to_seq_len, pad_multiple
from topoplan.specs.job import Job
from topoplan.specs.model import LinearAttention
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import check_keys
from topoplan.trainers.traits import MCA

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

_STAGES = ("pt", "sft", "dpo")

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
    check_finetuning(job, where)
    check_optimizer(job, where)
    check_token_prediction(spec)
    check_preferences(spec)
    check_freezing(spec)


def check_finetuning(job: Job, where: str = "") -> None:
    """Raise SpecError for all but full fine-tuning: the trainer builds no adapter and freezes no layers."""
    if job.finetuning == "full":
        return
    swift = "megatron (ms-swift's), " if job.finetuning == "lora" else ""
    raise SpecError(
        f"finetuning {job.finetuning!r} with backend mca: LLaMA-Factory's trainer for Megatron parses it and trains all"
        " weights all the same",
        where=where,
        expected="expected full",
        remedy=f"take backend {swift}ddp, deepspeed or fsdp2",
    )


def check_optimizer(job: Job, where: str = "") -> None:
    """Raise SpecError for states of the optimizer that no trainer on Megatron keeps."""
    if job.pure_bf16 or job.optimizer != "adamw":
        what = "pure_bf16" if job.pure_bf16 else f"optimizer {job.optimizer}"
        raise SpecError(f"{what}: Megatron's optimizer has no such mode", where=where, remedy="leave it out")


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


def check_freezing(spec: Spec) -> None:
    """Raise SpecError where stage pt is to leave parts of a vision-language model as they are.

    LLaMA-Factory train/mca/workflow.py: run_sft and run_dpo call _freeze_model_parameters, and run_pt does not.
    """
    job = spec.job
    if job.stage != "pt" or spec.model.vision is None:
        return
    keys = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
    frozen = [key for key in keys if getattr(job, key)]
    if frozen:
        raise SpecError(
            f"stage pt of {spec.model.name}: the MCA trainer freezes nothing in it, and trains all of the model",
            where=spec.path or "",
            expected=f"expected {listed(frozen)} false",
            remedy="set that, or take backend ddp, deepspeed or fsdp2, which do freeze",
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


def check_layout(spec: Spec, layout: Layout) -> None:
    """Raise for a model, job or layout that the trainer would refuse, or train otherwise than planned."""
    job, model, cluster = spec.job, spec.model, spec.cluster
    if layout.backend != "mca":
        raise LayoutError(f"no bundle can be written for the backend {layout.backend!r}", expected="expected mca")
    if layout.world_size != cluster.world_size:
        raise LayoutError(
            f"tp {layout.tp} * pp {layout.pp} * cp {layout.cp} * dp {layout.dp} = {layout.world_size} GPUs,"
            f" and the cluster has {cluster.world_size}"
        )
    if model.model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"LLaMA-Factory's Megatron path does not train {model.model_type!r}",
            where=model.name,
            expected="it knows " + ", ".join(sorted(SUPPORTED_MODEL_TYPES)),
        )
    if job.stage not in _STAGES:
        raise SpecError(f"stage {job.stage!r}", where="job.stage", expected="expected pt, sft or dpo")
    check_finetuning(job, "job.finetuning")
    check_preferences(spec)
    check_keys(spec, layout)
    _check_samples(job, layout)
    _check_sequence_padding(job, layout)


def _check_samples(job: Job, layout: Layout) -> None:
    """An epoch needs a full batch: trainer/trainer.py divides by the number of them (_inner_training_loop)."""
    if job.samples is None or job.samples >= job.global_batch_size:
        return
    full = layout.micro_batch_size * layout.dp
    if job.samples < full:
        so = (
            f"micro batch {layout.micro_batch_size} * dp {layout.dp} = {full}: the trainer would wait for ever for them"
        )
    else:
        so = f"the global batch of {job.global_batch_size}: the trainer would end in a division by zero after a step"
    raise SpecError(
        f"{job.samples} samples are fewer than {so}",
        where="job.samples",
        remedy="lower global_batch_size, or repeat the samples in the data set",
    )


def _check_sequence_padding(job: Job, layout: Layout) -> None:
    """Sequences that are not packed are padded by the collator, to a length that CP and SP must be able to split."""
    parts, pad = sequence_parts(layout), pad_multiple(MCA.padding, job)
    fixed_length = is_padded_to_seq_len(MCA.padding, job, layout)
    length = math.ceil(job.seq_len / pad) * pad if fixed_length else pad
    if length % parts:
        what = (
            f"cutoff_len {job.seq_len}, padded to {length},"
            if fixed_length
            else f"a length padded to multiples of {pad}"
        )
        raise LayoutError(
            f"{what} cannot be split into {parts} parts (cp {layout.cp}, tp {layout.tp})",
            where="job.seq_len" if fixed_length else "job.packing",
            remedy=f"take a multiple of {math.lcm(pad, parts)}" if fixed_length else "set packing: true",
        )
