"""What ms-swift refuses, or trains differently from the plan, and valid settings that may surprise the user."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from topoplan.errors import LayoutError, ModelError, nearest
from topoplan.layout.layout import Layout
from topoplan.operators.finetuning import target_names
from topoplan.specs.facts import facts_of
from topoplan.specs.job import ADAPTERS, Job
from topoplan.specs.model import Attention, LinearAttention, Model
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import refused_keys
from topoplan.trainers.loading import too_large_to_load
from topoplan.trainers.refusal import (
    FP8_RECIPES,
    Refusal,
    mca_finetuning,
    megatron_optimizer,
    offload,
    pure_fp16,
    quantized_weights,
)
from topoplan.trainers.swift.samples import is_file, is_hub_name, samples_of
from topoplan.trainers.train_yaml import slow_precision
from topoplan.trainers.traits import SHARDED

MEGATRON_MODEL_TYPES = frozenset(
    [
        *("bailing_hybrid", "bailing_moe", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
        *("dots1", "ernie4_5", "ernie4_5_moe", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "hy_v3"),
        *("internlm3", "kimi_k2", "llama", "mimo", "minimax_m2", "nemotron_h", "olmoe"),
        *("qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"),
        *("qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
    ]
)
"""Hugging Face's model types in `register_model` of mcore_bridge 1.6.5, `model/gpts/` and `model/mm_gpts/`."""

LIGER_MODEL_TYPES = frozenset(
    [
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma4"),
        *("glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "internvl"),
        *("llama", "llama4", "llava", "ministral", "mistral", "mixtral", "mllama", "nemotron", "olmo2", "olmo3"),
        *("paligemma", "phi3", "pixtral", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "smollm3", "smolvlm"),
    ]
)
"""MODEL_TYPE_TO_APPLY_LIGER_FN of liger_kernel 0.8.5, `transformers/monkey_patch.py`."""

_STAGES = ("pt", "sft")
_HALF = ("bf16", "fp16")


def sharded_refusals(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse a model, job or layout that `swift sft` would refuse, or train differently from the plan."""
    job = spec.job
    yield from _stage(spec.job)
    if job.precision not in _HALF:
        yield Refusal(
            "precision",
            f"precision {job.precision}: `swift sft` trains in bf16 or fp16, fp8 is for `megatron sft`",
            where="job.precision",
        )
    if job.packing and spec.cluster.gpu.architecture in ("volta", "turing"):
        # swift/arguments/sft_args.py, _check_padding_free; the README of flash-attention 2 starts at Ampere.
        what = f"packing needs FlashAttention 2, which has no kernels for {spec.cluster.gpu.name}"
        yield Refusal("packing", what, where="job.packing")
    yield from _weights(job, layout)
    yield from quantized_weights(job)
    yield from _sequence_split(spec.model, layout)
    yield from _shards(spec, layout)
    yield from too_large_to_load(spec, layout)


def _stage(job: Job) -> Iterator[Refusal]:
    if job.stage not in _STAGES:
        yield Refusal(
            "stage",
            f"stage {job.stage}: no `rlhf` command of ms-swift is written yet",
            where="job.stage",
            expected="expected pt or sft",
        )


def _shards(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    yield from offload(spec, layout)
    if layout.fused_linear_cross_entropy and spec.model.model_type not in LIGER_MODEL_TYPES:
        # transformers integrations/liger.py; liger_kernel _apply_liger_kernel only logs it and continues.
        yield Refusal(
            "liger",
            f"Liger has no kernels for {spec.model.model_type!r}, and the model would be trained without",
            where="layout.fused_linear_cross_entropy",
            remedy="leave it out",
            kind=ModelError,
        )
    if layout.recompute.granularity == "selective":
        yield Refusal(
            "recompute",
            "recompute selective: gradient checkpointing is for whole layers",
            expected="none or full",
            kind=LayoutError,
        )
    if layout.backend == "fsdp2" and layout.sharding != "full":
        # swift/arguments/sft_args.py, _init_fsdp passes on `fsdp` and `fsdp_config`, which have no device mesh.
        yield Refusal(
            "hybrid-sharding",
            f"sharding {layout.sharding}: ms-swift shards with FSDP2 over all ranks, and has no option for a mesh",
            where="layout.sharding",
            remedy="pin sharding=full",
        )


def _weights(job: Job, layout: Layout) -> Iterator[Refusal]:
    yield from pure_fp16(job)
    if job.finetuning == "freeze" and layout.backend == "ddp" and not job.pure_bf16:
        # pipelines/train/tuner.py, prepare_model only sets requires_grad; all weights have torch_dtype.
        yield Refusal(
            "frozen-dtype",
            "finetuning freeze with ddp: ms-swift keeps frozen and trained weights in one dtype",
            where="job.finetuning",
            remedy="take backend deepspeed or fsdp2, which keep fp32 weights of what is trained, or pure_bf16",
        )
    if job.optimizer == "adamw":
        return
    if layout.backend == "fsdp2":
        what = f"optimizer {job.optimizer}: bitsandbytes' optimizers do not take FSDP2's sharded tensors"
        yield Refusal("optimizer", what, where="job.optimizer")
    if layout.offload_optimizer:
        what = f"offload_optimizer: {job.optimizer} has kernels for the GPU alone"
        yield Refusal("optimizer", what, where="layout.offload_optimizer")


def _sequence_split(model: Model, layout: Layout) -> Iterator[Refusal]:
    """Refuse a split of sequences that `sequence_parallel_size` cannot express.

    ms-swift combines Ulysses and ring attention itself (sequence_parallel.py, _init_device_mesh).
    """
    if layout.cp > 1:
        yield Refusal(
            "sequence-split",
            f"cp {layout.cp}: ms-swift has ring attention only as the rest of sequence_parallel_size that the"
            " key-value heads leave over",
            where="layout.cp",
            remedy="pin cp=1",
        )
    if layout.ulysses == 1:
        return
    for layer in dict.fromkeys(model.layers):
        if isinstance(layer.attention, LinearAttention):
            what = f"ulysses {layout.ulysses}: {model.name} has linear attention, which is planned without"
            yield Refusal("sequence-split", what, where="layout.ulysses")
            continue
        # num_key_value_heads of the config, which in latent attention equals the number of heads
        heads = layer.attention.kv_heads if isinstance(layer.attention, Attention) else layer.attention.heads
        if heads % layout.ulysses:
            common = math.gcd(heads, layout.ulysses)
            yield Refusal(
                "sequence-split",
                f"key-value heads {heads} % ulysses {layout.ulysses} = {heads % layout.ulysses}: ms-swift would"
                f" take Ulysses over gcd = {common} and ring attention over {layout.ulysses // common}",
                where="layout.ulysses",
                remedy=f"pin ulysses={common}",
            )
    if layout.fused_linear_cross_entropy:
        # trainers/seq2seq_trainer.py, compute_loss: "loss function defined in Liger Kernel will not take effect".
        yield Refusal(
            "liger",
            "fused_linear_cross_entropy with ulysses: ms-swift then takes the loss from whole logits",
            where="layout.fused_linear_cross_entropy",
            remedy="pin one of them off",
        )


# Megatron ------------------------------------------------------------------------------------------------------------


def megatron_job_refusals(spec: Spec) -> Iterator[Refusal]:
    """Refuse jobs that are not predicted on Megatron-core in ms-swift, and adapters that no layout supports."""
    yield from finetuning(spec.job, spec.model, spec.path or "")
    yield from megatron_optimizer(spec.job, spec.path or "")
    if spec.job.finetuning == "lora":
        if spec.job.stage not in _STAGES:
            what = (
                f"stage {spec.job.stage} with LoRA on Megatron is what ms-swift alone trains, and no files are written"
            )
            yield Refusal("adapter-stage", f"{what} for it yet", where=spec.path or "", is_predicted=True)
        yield from (replace(refusal, is_predicted=True) for refusal in _model_type(spec.model))


def _model_type(model: Model) -> Iterator[Refusal]:
    if model.model_type not in MEGATRON_MODEL_TYPES:
        yield Refusal(
            "model-type",
            f"mcore_bridge does not build {model.model_type!r} for `megatron sft`",
            where=model.name,
            expected="it knows " + ", ".join(sorted(MEGATRON_MODEL_TYPES)),
            kind=ModelError,
        )


def finetuning(job: Job, model: Model, where: str = "") -> Iterator[Refusal]:
    """Refuse kinds of fine-tuning other than full and LoRA."""
    if job.finetuning == "lora":
        yield from _adapters(job, model, where)
    elif job.finetuning != "full":
        yield Refusal(
            "finetuning",
            f"finetuning {job.finetuning!r} with backend megatron: ms-swift's trainer has full and lora",
            where=where,
            expected="expected full or lora",
            remedy="take backend ddp, deepspeed or fsdp2",
        )


def _adapters(job: Job, model: Model, where: str) -> Iterator[Refusal]:
    """Refuse LoRA that is not predicted or not implemented on Megatron-core (mcore_bridge 1.6.5 `tuners/lora.py`)."""
    if job.precision not in _HALF:
        # lora.py, forward: "rank-sized (e.g. [4, 2560]), which violates TE's FP8 GEMM divisibility rules".
        yield Refusal(
            "adapter-precision",
            f"precision {job.precision} with LoRA: Transformer Engine's fp8 products do not take matrices as"
            " narrow as a rank, and no mixture is predicted",
            where=where,
            expected="expected bf16 or fp16",
        )
    if job.freeze_language_model or (
        model.vision is not None and not (job.freeze_vision_tower and job.freeze_multi_modal_projector)
    ):
        yield Refusal(
            "adapter-parts",
            "LoRA is predicted with backend megatron for the language model alone",
            where=where,
            expected="expected freeze_vision_tower and freeze_multi_modal_projector true, freeze_language_model false",
        )
    known = (*target_names(model), *(["eh_proj"] if job.mtp_num_layers else []))
    for name in job.lora_target:
        if name not in ("all", *known):
            yield Refusal(
                "adapter-targets",
                f"{model.name} has no linear layer called {name} in Megatron-core",
                where="job.lora_target",
                expected=f"expected all, or some of {', '.join(known)}",
                remedy=nearest(name, known),
            )


def megatron_refusals(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse a model, job or layout that `megatron sft` would refuse, or train differently from the plan."""
    job, model, gpu = spec.job, spec.model, spec.cluster.gpu
    yield from _stage(spec.job)
    yield from _model_type(model)
    if gpu.architecture == "volta":
        what = f"mcore_bridge needs Transformer Engine, which has no kernels for {gpu.name}"
        yield Refusal("transformer-engine", what, where="gpu")
    if layout.backend == "mca":
        yield from mca_finetuning(job, "job.finetuning")
    else:
        yield from finetuning(job, model, "job.finetuning")
    yield from megatron_optimizer(job, "job")
    yield from refused_keys(spec, layout)
    recipe = FP8_RECIPES.get(gpu.architecture)
    known = {
        "bf16",
        "fp16",
        *(("fp8", recipe) if recipe else ()),
        *(["nvfp4"] if gpu.architecture == "blackwell" else ()),
    }
    if job.precision not in known:
        yield Refusal(
            "precision",
            f"precision {job.precision} is not trained on {gpu.name} ({gpu.architecture})",
            where="job.precision",
            expected="expected bf16, fp16, fp8 on Hopper, or fp8, mxfp8 or nvfp4 on Blackwell",
        )
    if layout.attention_backend in ("flash", "unfused"):
        what = "attention_backend unfused: ms-swift then pads samples, which are planned end to end"
        if layout.attention_backend == "flash":
            what = "attention_backend flash keeps two outputs, which ms-swift's does not: its samples lie end to end"
        yield Refusal("attention", what, where="layout.attention_backend", remedy="leave it out")
    if layout.overlap_moe_expert_parallel_comm:
        yield Refusal(
            "combined-passes",
            "overlap_moe_expert_parallel_comm: `megatron sft` has no such argument, and its forward step makes no plan"
            " of the layers",
            where="layout.overlap_moe_expert_parallel_comm",
            remedy="leave it out",
        )
    is_alone = not (layout.grad_reduce_in_fp32 or layout.precision_aware_optimizer)
    if job.precision != "fp16" and is_alone:
        # megatron_args.py, _map_dtype sets accumulate_allreduce_grads_in_fp32 in bf16 unless main_grads_dtype is bf16.
        yield Refusal(
            "gradient-sum",
            "grad_reduce_in_fp32 false: in bf16 ms-swift sums gradients in fp32 without precision_aware_optimizer",
            where="layout.grad_reduce_in_fp32",
            remedy="pin precision_aware_optimizer=true, or grad_reduce_in_fp32=true",
        )
    yield from _iterations(job, layout)


def _iterations(job: Job, layout: Layout) -> Iterator[Refusal]:
    """Refuse a run whose steps ms-swift cannot derive: whole epochs, or train_iters above 0 (init_iters)."""
    if job.epochs != int(job.epochs) and job.samples is None:
        yield Refusal(
            "epochs",
            f"epochs {job.epochs:g}: `megatron sft` takes whole epochs, or a number of steps, which needs job.samples",
            where="job.epochs",
            remedy="add samples to the job",
        )
    batch = layout.micro_batch_size * layout.dp
    if job.samples is not None and job.samples // batch * batch * job.epochs < job.global_batch_size:
        yield Refusal(
            "samples",
            f"{job.samples} samples are less than one step of {job.global_batch_size}",
            where="job.samples",
            remedy="lower global_batch_size, or repeat the samples in the data set",
        )


def swift_warnings(spec: Spec, layout: Layout) -> Iterator[str]:
    """Warn about valid settings that may surprise the user."""
    job, model = spec.job, spec.model
    if job.template is not None:
        yield (
            f"template {job.template} is a name of LLaMA-Factory's: ms-swift uses its own for the model; for another,"
            " write template under job.trainer"
        )
    if model.config_path is not None and "template" not in job.trainer:
        yield (
            "ms-swift finds model_type and template by the name of the model's directory: where the hub has no such"
            " name, write both under job.trainer"
        )
    for name in samples_of(job):
        if not is_file(name) and not is_hub_name(name):
            yield (
                f"ms-swift knows no data set {name}: name a file of samples (.jsonl) or a hub id (org/name), which is"
                " looked for on ModelScope, or with use_hf under job.trainer on Hugging Face"
            )
    adapts = job.finetuning in ADAPTERS and layout.backend in SHARDED
    if adapts and facts_of(model).is_moe and "all" in job.lora_target:
        yield (
            "experts get no adapters, as predicted: from transformers 5 on those of a layer are one tensor and no"
            " linear layers; before, all-linear has them too, with more memory"
        )
    yield from slow_precision(spec)
