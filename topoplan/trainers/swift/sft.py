"""train.yaml for `swift sft` (and `swift pt`): DDP, DeepSpeed and FSDP2, with LoRA and QLoRA.

Sources: ms-swift's swift/arguments/sft_args.py, base_args/, tuner_args.py and swift/trainers/arguments.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.specs.job import ADAPTERS, Job
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import entries
from topoplan.trainers.sharding_files import DEEPSPEED_FILE, deepspeed_text, fsdp_config
from topoplan.trainers.steps import training_steps
from topoplan.trainers.swift.arguments import DECIDED, user_arguments
from topoplan.trainers.swift.common import (
    adapter_entries,
    data_section,
    freeze_entries,
    model_entries,
    output_section,
    swift_head,
    warmup_entries,
)
from topoplan.trainers.swift.counterparts import in_terms_of
from topoplan.trainers.swift.refusals import swift_warnings
from topoplan.trainers.swift.sft_job import ROWS, trained_layers, trained_layers_regex
from topoplan.trainers.train_yaml import DDP_TIMEOUT, trainer_files, values_of
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.yaml_text import Entry, Section


def sft_files(spec: Spec, layout: Layout) -> TrainerFiles:
    """Write a layout's train.yaml, and the file for DeepSpeed or FSDP2."""
    stated = in_terms_of("swift sft", spec.job.trainer)
    max_steps = stated.get("max_steps")
    steps = training_steps(spec.job, max_steps if isinstance(max_steps, int) else None)
    sections = _sections(spec, layout, steps, stated)
    ours = values_of(sections)
    decided = {name: ours.get(name) for name in DECIDED["swift sft"]}
    if "accelerator_config" in ours:
        decided["accelerator_config"] = ours["accelerator_config"]
    user = user_arguments(spec, "swift sft", decided)
    return trainer_files(
        spec,
        layout,
        sections,
        user=user,
        head=swift_head(spec, layout, f"swift {spec.job.stage}"),
        warnings=[*swift_warnings(spec, layout), *_warnings(user)],
        further=sharding_files(spec.job, layout),
    )


def _warnings(user: Mapping[str, Any]) -> list[str]:
    """Warn about `SftArguments._init_eval_strategy`, which sets eval_strategy to no if there is no evaluation data."""
    evaluates = user.get("eval_strategy", "no") != "no"
    if evaluates and not (user.get("split_dataset_ratio") or user.get("val_dataset") or user.get("eval_dataset")):
        return ["eval_strategy has no effect without val_dataset or split_dataset_ratio under job.trainer"]
    return []


def _sections(spec: Spec, layout: Layout, steps: int | None, user: Mapping[str, Any]) -> list[Section]:
    return [
        _model_section(spec, layout),
        data_section(spec, unpacked="padded to the longest sample of a micro batch"),
        _training_section(spec, user),
        _layout_section(spec, layout),
        Section(
            title="Memory",
            entries=tuple(entries(ROWS, ("gradient_checkpointing", "use_liger_kernel", "experts_impl"), spec, layout)),
        ),
        output_section(steps),
    ]


def _model_section(spec: Spec, layout: Layout) -> Section:
    job = spec.job
    adapters = job.finetuning in ADAPTERS
    quantized = "; quantized below" if job.finetuning == "qlora" else ""
    lines = [
        *model_entries(spec),
        Entry("tuner_type", "lora" if adapters else "full", f"train_type in ms-swift 3 and earlier{quantized}"),
        *_dtype_entries(job, layout),
    ]
    if job.finetuning == "freeze":
        lines += _layer_entries(spec)
    if adapters:
        lines += adapter_entries(job, 0.0)
    if job.finetuning == "qlora":
        lines += _quantization_entries(job, layout)
    lines += freeze_entries(spec)
    if spec.cluster.gpu.architecture in ("volta", "turing"):
        lines.append(Entry("attn_impl", "sdpa", "FlashAttention 2 needs Ampere or newer"))
    else:
        needs = "packing and sequence parallelism need it" if job.packing or layout.ulysses > 1 else "as predicted"
        lines.append(Entry("attn_impl", "flash_attn", needs))
    return Section(title="Model and method", entries=tuple(lines))


def _dtype_entries(job: Job, layout: Layout) -> list[Entry]:
    half = "float16" if job.precision == "fp16" else "bfloat16"
    if job.pure_bf16:
        dtype, comment = half, "for weights, gradients and Adam's moments"
    elif layout.backend == "deepspeed":
        dtype, comment = half, "DeepSpeed keeps fp32 copies of trained weights"
    elif layout.backend == "fsdp2":
        dtype, comment = half, "when loaded; accelerate converts trained weights to fp32"
    elif job.finetuning == "full":
        dtype, comment = "float32", "DDP trains the loaded weights: with bfloat16, Adam's moments would be bfloat16 too"
    else:
        dtype, comment = half, "for the frozen weights; PEFT creates adapters in fp32"
    # base_args/model_args.py, _init_mixed_precision: if unset, float32 weights enable fp16.
    autocast = job.precision == "bf16" and not job.pure_bf16
    lines = [
        Entry("torch_dtype", dtype, comment),
        Entry("bf16", autocast, "no autocast, because nothing is in fp32" if job.pure_bf16 else ""),
        Entry("fp16", job.precision == "fp16"),
    ]
    if job.pure_bf16 and job.finetuning in ADAPTERS:
        lines.append(Entry("lora_dtype", half, "PEFT would create adapters in fp32"))
    return lines


def _layer_entries(spec: Spec) -> list[Entry]:
    count, total = spec.job.freeze_trainable_layers, spec.model.num_layers
    layers = trained_layers(spec.model, count)
    which = f"the {'last' if count > 0 else 'first'} {len(layers)} of {total} layers"
    return [
        Entry("freeze_parameters_ratio", 1.0, "freezes all parameters except those of the next line"),
        Entry("trainable_parameters_regex", trained_layers_regex(spec.model, count), which),
    ]


def _quantization_entries(job: Job, layout: Layout) -> list[Entry]:
    bits = job.quantization_bit or 4
    lines = [
        Entry("quant_method", "bnb", "bitsandbytes, when the weights are loaded"),
        Entry("quant_bits", bits, "NF4 with double quantization" if bits == 4 else ""),
    ]
    if bits == 4:
        half = "float16" if job.precision == "fp16" else "bfloat16"
        lines.append(Entry("bnb_4bit_compute_dtype", half, "for matrix multiplications"))
        if layout.backend == "fsdp2" or layout.zero_stage == 3:
            lines.append(Entry("bnb_4bit_quant_storage", half, "packed as floats, because integers are not sharded"))
    return lines


def _training_section(spec: Spec, user: Mapping[str, Any]) -> Section:
    job = spec.job
    lines = [
        Entry("num_train_epochs", float(job.epochs)),
        Entry("learning_rate", float(job.learning_rate)),
        Entry("lr_scheduler_type", "cosine"),
        *warmup_entries("warmup_ratio", user),
        DDP_TIMEOUT,
    ]
    if job.optimizer == "adamw_8bit":
        lines.append(Entry("optim", "adamw_8bit", "8-bit moments (bitsandbytes)"))
    return Section(title="Training", entries=tuple(lines))


def _layout_section(spec: Spec, layout: Layout) -> Section:
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps", "sequence_parallel_size")
    lines = entries(ROWS, batch, spec, layout)
    beside = "the node scripts pass its absolute path"
    if layout.backend == "deepspeed":
        lines.append(Entry("deepspeed", DEEPSPEED_FILE, f"ZeRO-{layout.zero_stage}; {beside}"))
    elif layout.backend == "fsdp2":
        lines.append(Entry("fsdp", FSDP_FILE, beside))
        lines += entries(ROWS, ["accelerator_config"], spec, layout)
    shared = f" / ulysses {layout.ulysses}" if layout.ulysses > 1 else ""
    return Section(title=f"Layout: dp {layout.dp} = {layout.world_size} GPUs{shared}", entries=tuple(lines))


FSDP_FILE = "fsdp.json"


def sharding_files(job: Job, layout: Layout) -> dict[str, str]:
    """Return the files' texts by name; none for ddp.

    ms-swift's presets (`swift/config/`) depend on its version rather than on the plan: zero3_offload offloads
    parameters along with the optimizer, fsdp2 always recomputes, and the others have bucket sizes other than predicted.
    """
    if layout.backend == "deepspeed":
        return {DEEPSPEED_FILE: deepspeed_text(layout)}
    return {FSDP_FILE: json.dumps(fsdp_config(job, layout), indent=2) + "\n"} if layout.backend == "fsdp2" else {}
