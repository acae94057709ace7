"""train.yaml for `swift sft` (and `swift pt`): DDP, DeepSpeed and FSDP2, with LoRA and QLoRA.

Sources: ms-swift's swift/arguments/sft_args.py, base_args/, tuner_args.py and swift/trainers/arguments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.planner.plan import Plan
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.steps import training_steps
from topoplan.trainers.swift.arguments import user_arguments
from topoplan.trainers.swift.common import (
    adapter_entries,
    data_section,
    freeze_entries,
    head,
    model_entries,
    output_section,
)
from topoplan.trainers.swift.refusals import check_sharded
from topoplan.trainers.swift.sharding import DEEPSPEED_FILE, FSDP_FILE, sharding_files
from topoplan.trainers.swift.support import swift_warnings
from topoplan.trainers.train_yaml import trainer_files
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.usual import DDP_TIMEOUT_S, SYNC_EACH_BATCH, WARMUP_FRACTION, WHY_SYNC, must_say_sync
from topoplan.trainers.yaml_text import Entry, Section

_DECIDED = (
    *("tuner_type", "torch_dtype", "bf16", "fp16", "freeze_vit", "freeze_aligner", "freeze_llm", "lora_rank"),
    *("target_modules", "quant_method", "quant_bits", "freeze_parameters_ratio", "trainable_parameters_regex"),
    *("bnb_4bit_quant_storage", "max_length", "packing", "max_pixels", "num_train_epochs", "optim"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "sequence_parallel_size", "deepspeed", "fsdp"),
    *("gradient_checkpointing", "use_liger_kernel", "add_version", "deepspeed_autotp_size", "device_map"),
    *("fsdp_config", "zero_hpz_partition_size", "max_epochs", "optimizer", "use_galore"),
)
"""Arguments that memory and time were predicted with, or that the scripts go by."""


def sft_files(spec: Spec, plan: Plan) -> TrainerFiles:
    """train.yaml of a plan, and the file that DeepSpeed or FSDP2 reads. Raises what `check_sharded` raises."""
    check_sharded(spec, plan.layout)
    max_steps = spec.job.trainer.get("max_steps")
    steps = training_steps(spec.job, max_steps if isinstance(max_steps, int) else None)
    sections = _sections(spec, plan.layout, steps)
    ours = {entry.key: entry.value for section in sections for entry in section.entries}
    decided = {name: ours.get(name) for name in _DECIDED}
    if "accelerator_config" in ours:
        decided["accelerator_config"] = ours["accelerator_config"]
    user = user_arguments(spec, "swift sft", decided)
    return trainer_files(
        spec,
        plan,
        sections,
        user=user,
        head=head(spec, plan, f"swift {spec.job.stage}"),
        warnings=[*plan.warnings, *swift_warnings(spec, plan.layout), *_warnings(user)],
        further=sharding_files(spec.job, plan.layout),
    )


def _warnings(user: Mapping[str, Any]) -> list[str]:
    """`SftArguments._init_eval_strategy`: without data to evaluate on, eval_strategy is set to no."""
    evaluates = user.get("eval_strategy", "no") != "no"
    if evaluates and not (user.get("split_dataset_ratio") or user.get("val_dataset") or user.get("eval_dataset")):
        return ["eval_strategy has no effect without val_dataset or split_dataset_ratio under job.trainer"]
    return []


def _sections(spec: Spec, layout: Layout, steps: int | None) -> list[Section]:
    return [
        _model_section(spec, layout),
        data_section(spec, unpacked="padded to the longest of a micro batch"),
        _training_section(spec),
        _layout_section(layout),
        _memory_section(spec, layout),
        output_section(steps),
    ]


def _model_section(spec: Spec, layout: Layout) -> Section:
    job = spec.job
    adapters = job.finetuning in ("lora", "qlora")
    entries = [
        *model_entries(spec),
        Entry(
            key="tuner_type",
            value="lora" if adapters else "full",
            comment="train_type until ms-swift 3" + ("; quantized below" if job.finetuning == "qlora" else ""),
        ),
        *_dtype_entries(job, layout),
    ]
    if job.finetuning == "freeze":
        entries += _layer_entries(spec)
    if adapters:
        entries += adapter_entries(job)
    if job.finetuning == "qlora":
        entries += _quantization_entries(job, layout)
    entries += freeze_entries(spec)
    if spec.cluster.gpu.architecture in ("volta", "turing"):
        attention = Entry(key="attn_impl", value="sdpa", comment="FlashAttention 2 starts at Ampere")
    else:
        needs = "packing and sequence parallelism need it" if job.packing or layout.ulysses > 1 else "as predicted"
        attention = Entry(key="attn_impl", value="flash_attn", comment=needs)
    return Section(title="Model and method", entries=(*entries, attention))


def _dtype_entries(job: Job, layout: Layout) -> list[Entry]:
    """The dtype that weights are loaded in, and that of the computation."""
    half = "float16" if job.precision == "fp16" else "bfloat16"
    if job.pure_bf16:
        dtype, comment = half, "of weights, gradients and Adam's moments"
    elif layout.backend == "deepspeed":
        dtype, comment = half, "DeepSpeed keeps fp32 copies of what is trained"
    elif layout.backend == "fsdp2":
        dtype, comment = half, "as loaded; accelerate makes what is trained fp32"
    elif job.finetuning == "full":
        dtype, comment = "float32", "DDP trains what is loaded: in bfloat16, Adam's moments would be too"
    else:
        dtype, comment = half, "of the frozen weights; PEFT makes adapters fp32"
    # base_args/model_args.py, _init_mixed_precision: unset, float32 weights turn fp16 on.
    entries = [
        Entry(key="torch_dtype", value=dtype, comment=comment),
        Entry(
            key="bf16",
            value=job.precision == "bf16" and not job.pure_bf16,
            comment="no autocast: there is nothing in fp32" if job.pure_bf16 else "",
        ),
        Entry(key="fp16", value=job.precision == "fp16"),
    ]
    if job.pure_bf16 and job.finetuning in ("lora", "qlora"):
        entries.append(Entry(key="lora_dtype", value=half, comment="PEFT would make adapters fp32"))
    return entries


def _trained_layers(model: Model, count: int) -> range:
    """The last `count` layers, or the first ones for a negative number."""
    total = model.num_layers
    return range(max(0, total - count), total) if count > 0 else range(min(-count, total))


def trained_layers_regex(model: Model, count: int) -> str:
    """ms-swift's trainable_parameters_regex for these layers, by their names in Hugging Face's model."""
    numbers = "|".join(map(str, _trained_layers(model, count)))
    tower = r"language_model\.(?:model\.)?" if model.vision is not None else r"^model\."
    return rf"{tower}layers\.(?:{numbers})\."


def _layer_entries(spec: Spec) -> list[Entry]:
    """All is frozen but some layers."""
    count, total = spec.job.freeze_trainable_layers, spec.model.num_layers
    layers = _trained_layers(spec.model, count)
    return [
        Entry(key="freeze_parameters_ratio", value=1.0, comment="everything, but for what the next line names"),
        Entry(
            key="trainable_parameters_regex",
            value=trained_layers_regex(spec.model, count),
            comment=f"the {'last' if count > 0 else 'first'} {len(layers)} of {total} layers",
        ),
    ]


def _quantization_entries(job: Job, layout: Layout) -> list[Entry]:
    bits = job.quantization_bit or 4
    entries = [
        Entry(key="quant_method", value="bnb", comment="bitsandbytes, while the weights are loaded"),
        Entry(key="quant_bits", value=bits, comment="NF4, its scales quantized again" if bits == 4 else ""),
    ]
    if bits == 4:
        half = "float16" if job.precision == "fp16" else "bfloat16"
        entries.append(Entry(key="bnb_4bit_compute_dtype", value=half, comment="of the products"))
        if layout.backend == "fsdp2" or layout.zero_stage == 3:
            comment = "packed in floats: integers are not sharded"
            entries.append(Entry(key="bnb_4bit_quant_storage", value=half, comment=comment))
    return entries


def _training_section(spec: Spec) -> Section:
    job = spec.job
    entries = [
        Entry(key="num_train_epochs", value=float(job.epochs)),
        Entry(key="learning_rate", value=float(job.learning_rate)),
        Entry(key="lr_scheduler_type", value="cosine"),
        Entry(key="warmup_ratio", value=WARMUP_FRACTION, comment="of all steps"),
        Entry(key="ddp_timeout", value=DDP_TIMEOUT_S, comment="s: tokenising must end in time, and a hang does"),
    ]
    if job.optimizer == "adamw_8bit":
        entries.append(Entry(key="optim", value="adamw_8bit", comment="bitsandbytes: two moments in 8 bits"))
    return Section(title="Training", entries=tuple(entries))


def _layout_section(layout: Layout) -> Section:
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    entries = [
        Entry(key="per_device_train_batch_size", value=layout.micro_batch_size),
        Entry(
            key="gradient_accumulation_steps",
            value=layout.gradient_accumulation_steps,
            comment=f"micro batch * this * dp {layout.dp} = {batch} sequences a step",
        ),
    ]
    if layout.ulysses > 1:
        comment = "Ulysses: so many GPUs share a sequence, by its heads in attention"
        entries.append(Entry(key="sequence_parallel_size", value=layout.ulysses, comment=comment))
    beside = "lies beside this file; the node scripts name it by its whole path"
    if layout.backend == "deepspeed":
        entries.append(Entry(key="deepspeed", value=DEEPSPEED_FILE, comment=f"ZeRO-{layout.zero_stage}; {beside}"))
    elif layout.backend == "fsdp2":
        entries.append(Entry(key="fsdp", value=FSDP_FILE, comment=beside))
        if must_say_sync(layout):
            # sft_args.py sets dispatch_batches where there is no accelerator_config.
            value = {"dispatch_batches": False, **SYNC_EACH_BATCH}
            entries.append(Entry(key="accelerator_config", value=value, comment=WHY_SYNC))
    shared = f" / ulysses {layout.ulysses}" if layout.ulysses > 1 else ""
    return Section(title=f"Layout: dp {layout.dp} = {layout.world_size} GPUs{shared}", entries=tuple(entries))


def _memory_section(spec: Spec, layout: Layout) -> Section:
    full = layout.recompute.granularity == "full"
    if layout.backend == "fsdp2":
        # _check_fsdp2_compatibility: "Should use activation_checkpointing in fsdp_config instead".
        how = "fsdp.json has it: activation_checkpointing" if full else "on by default"
        checkpointing = Entry(key="gradient_checkpointing", value=False, comment=how)
    else:
        how = "only the input of each layer is kept" if full else "on by default"
        checkpointing = Entry(key="gradient_checkpointing", value=full, comment=how)
    entries = [checkpointing]
    if layout.fused_linear_cross_entropy:
        comment = "the loss from hidden states, without the logits as a whole"
        entries.append(Entry(key="use_liger_kernel", value=True, comment=comment))
    return Section(title="Memory", entries=tuple(entries))
