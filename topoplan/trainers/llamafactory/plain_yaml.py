"""train.yaml for DeepSpeed, FSDP2 and plain data parallelism: the plan in LLaMA-Factory's keys, with reasons.

Sources: LLaMA-Factory hparams/, model/adapter.py and model/model_utils/, transformers training_args.py, at the versions
named in `topoplan/catalog/trainer_keys/llamafactory.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import entries
from topoplan.trainers.llamafactory.key_list import trainer_versions
from topoplan.trainers.llamafactory.plain_job import ROWS
from topoplan.trainers.llamafactory.plain_refusals import FREEZABLE_MODEL_TYPES, support_warnings
from topoplan.trainers.llamafactory.sections import (
    data_section,
    evaluation_entries,
    model_section,
    training_section,
    versions_line,
)
from topoplan.trainers.llamafactory.user_keys import OPTIMIZERS, user_keys
from topoplan.trainers.sharding_files import ACCELERATE_FILE, DEEPSPEED_FILE, accelerate_text, deepspeed_text
from topoplan.trainers.steps import training_steps
from topoplan.trainers.train_yaml import head, output_section, trainer_files, values_of
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.usual import warmup_steps
from topoplan.trainers.yaml_text import Entry, Section


def plain_trainer_files(spec: Spec, layout: Layout) -> TrainerFiles:
    """Write train.yaml, and ds_config.json or accelerate.yaml if the backend needs one.

    Raises SpecError for a user's key that contradicts the layout.
    """
    warnings = [*support_warnings(spec, layout)]
    user = user_keys(spec, layout, written_keys(spec, layout), warnings, "plain")
    return trainer_files(
        spec,
        layout,
        _sections(spec, layout, user),
        user=user,
        head=head(spec, layout, f"LLaMA-Factory {trainer_versions()['llamafactory']}, {versions_line()}"),
        warnings=warnings,
        further=_further(spec, layout),
    )


def _further(spec: Spec, layout: Layout) -> dict[str, str]:
    if layout.backend == "deepspeed":
        return {DEEPSPEED_FILE: deepspeed_text(layout)}
    if layout.backend == "fsdp2":
        return {ACCELERATE_FILE: accelerate_text(spec, layout)}
    return {}


def written_keys(spec: Spec, layout: Layout) -> dict[str, Any]:
    """Return what train.yaml contains without the user's keys."""
    return values_of(_sections(spec, layout, {}))


def _sections(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> list[Section]:
    steps = training_steps(spec.job, user.get("max_steps"))
    why = "a guess, because the spec has no samples" if steps is None else f"3% of {steps} steps"
    where = "a directory on every node"
    further = (*_precision_entries(spec.job, layout), _optimizer_entry(spec.job, layout))
    return [
        model_section(spec, FREEZABLE_MODEL_TYPES, where, *_method_entries(spec.job)),
        data_section(spec, "shuffled in each epoch"),
        training_section(spec, warmup_steps(steps), why, *further),
        _layout_section(spec, layout),
        _memory_section(spec, layout),
        output_section(
            steps,
            *evaluation_entries(user, steps),
            Entry("logging_steps", 1),
            Entry("report_to", "none", "or wandb, tensorboard"),
        ),
    ]


def _method_entries(job: Job) -> list[Entry]:
    if job.finetuning == "full":
        return [Entry("finetuning_type", "full")]
    if job.finetuning == "freeze":
        layers = job.freeze_trainable_layers
        which = f"only the {'last' if layers > 0 else 'first'} {abs(layers)} layers are trained"
        return [Entry("finetuning_type", "freeze"), Entry("freeze_trainable_layers", layers, which)]
    target = ",".join(job.lora_target)
    lines = [
        Entry("finetuning_type", "lora"),
        Entry("lora_rank", job.lora_rank or 8, "lora_alpha is twice this by default"),
        *([Entry("lora_dropout", job.lora_dropout)] if job.lora_dropout else []),
        Entry("lora_target", target, "every linear layer except the output layer" if target == "all" else ""),
    ]
    if job.finetuning == "qlora":
        bits = job.quantization_bit or 4
        lines.append(Entry("quantization_bit", bits, "each rank quantizes the bf16 weights when it loads them"))
        lines.append(Entry("quantization_method", "bnb"))
        if bits == 4:
            why = "also quantizes the scales of the blocks: saves 0.37 bits per weight"
            lines.append(Entry("double_quantization", True, why))
    return lines


def _precision_entries(job: Job, layout: Layout) -> list[Entry]:
    if job.pure_bf16:
        return [Entry("pure_bf16", True, "weights, gradients and Adam's moments in bf16, without an fp32 copy")]
    kept = {
        "ddp": "for computation; trained weights are kept in fp32",
        "deepspeed": "for weights and gradients; DeepSpeed keeps master weights in fp32",
        "fsdp2": "for gathered weights and activations; shards are kept in fp32",
    }
    return [Entry(job.precision, True, kept[layout.backend])]


def _optimizer_entry(job: Job, layout: Layout) -> Entry:
    if layout.offload_optimizer:
        why = "replaced by DeepSpeed's CPU Adam with the same settings"
    elif job.optimizer == "adamw_8bit":
        why = "8-bit moments (bitsandbytes)"
    else:
        why = "a single kernel, without temporary copies"
    return Entry("optim", OPTIMIZERS[job.optimizer], why)


def _layout_section(spec: Spec, layout: Layout) -> Section:
    lines = entries(ROWS, ("per_device_train_batch_size", "gradient_accumulation_steps"), spec, layout)
    notes: tuple[str, ...] = ()
    title = f"Layout: a full model on each of {layout.dp} GPUs"
    if layout.backend == "deepspeed":
        why = "next to this file; the node scripts pass its absolute path"
        lines.append(Entry("deepspeed", DEEPSPEED_FILE, why))
        title = f"Layout: ZeRO-{layout.zero_stage} over {layout.dp} GPUs"
    elif layout.backend == "fsdp2":
        lines += entries(ROWS, ["accelerator_config"], spec, layout)
        notes = (f"FSDP2 is configured in {ACCELERATE_FILE}, which the node scripts pass to accelerate",)
        title = f"Layout: FSDP2 over {layout.dp} GPUs"
    return Section(title=title, entries=tuple(lines), notes=notes)


def _memory_section(spec: Spec, layout: Layout) -> Section:
    lines = entries(ROWS, ("disable_gradient_checkpointing", "enable_liger_kernel"), spec, layout)
    lines.insert(1, Entry("flash_attn", "auto", "PyTorch's attention; fa2 needs the package flash-attn"))
    return Section(title="Memory", entries=tuple(lines))
