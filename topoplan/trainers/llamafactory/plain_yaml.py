"""train.yaml for DeepSpeed, FSDP2 and plain data parallel training: the plan in LLaMA-Factory's keys, with reasons.

Sources: LLaMA-Factory hparams/, model/adapter.py and model/model_utils/, transformers training_args.py, at the versions
named in `topoplan/catalog/trainer_keys/llamafactory.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.planner.plan import Plan
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory import accelerate_yaml, deepspeed_json
from topoplan.trainers.llamafactory.data import data_section
from topoplan.trainers.llamafactory.key_list import trainer_versions
from topoplan.trainers.llamafactory.mca_facts import model_directory
from topoplan.trainers.llamafactory.plain_keys import OPTIMIZERS, plain_user_keys
from topoplan.trainers.llamafactory.plain_refusals import FREEZABLE_MODEL_TYPES, check_plain
from topoplan.trainers.llamafactory.plain_warnings import support_warnings
from topoplan.trainers.steps import training_steps
from topoplan.trainers.train_yaml import OUTPUT_TITLE, trainer_files
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.usual import DDP_TIMEOUT_S, SYNC_EACH_BATCH, WHY_SYNC, must_say_sync, save_steps, warmup_steps
from topoplan.trainers.yaml_text import Entry, Section


def plain_trainer_files(spec: Spec, plan: Plan) -> TrainerFiles:
    """train.yaml, with ds_config.json or accelerate.yaml beside it as the backend has it.

    Raises SpecError, LayoutError or ModelError for what the trainer cannot do, or a key of the user that contradicts
    the plan.
    """
    layout = plan.layout
    check_plain(spec, layout)
    warnings = [*plan.warnings, *support_warnings(spec, layout)]
    user = plain_user_keys(spec, layout, warnings)
    versions = trainer_versions()
    oldest, newest = versions["transformers"]
    head = (
        f"{spec.model.name} on {spec.cluster.name}: plan {plan.id}",
        f"For LLaMA-Factory {versions['llamafactory']}, transformers {oldest} to {newest}.",
        "Relative paths start at the directory in which the node scripts start the trainer.",
    )
    return trainer_files(
        spec,
        plan,
        _sections(spec, layout, user),
        user=user,
        head=head,
        warnings=warnings,
        further=_further(spec, plan),
    )


def _further(spec: Spec, plan: Plan) -> dict[str, str]:
    if plan.layout.backend == "deepspeed":
        return {deepspeed_json.FILE: deepspeed_json.deepspeed_text(plan.layout)}
    if plan.layout.backend == "fsdp2":
        return {accelerate_yaml.FILE: accelerate_yaml.accelerate_text(spec, plan)}
    return {}


def _sections(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> list[Section]:
    return [
        _model_section(spec),
        data_section(spec, "shuffled in each epoch"),
        _training_section(spec, layout, user),
        _layout_section(spec, layout),
        _memory_section(spec, layout),
        _output_section(spec, user),
    ]


def _model_section(spec: Spec) -> Section:
    job, model = spec.job, spec.model
    entries = [
        Entry(key="model_name_or_path", value=model_directory(model), comment="a directory on every node"),
        Entry(key="stage", value=job.stage),
        Entry(key="do_train", value=True),
        *_method_entries(job),
    ]
    if model.vision is not None and model.model_type in FREEZABLE_MODEL_TYPES:
        entries += [
            Entry(key="freeze_vision_tower", value=job.freeze_vision_tower),
            Entry(key="freeze_multi_modal_projector", value=job.freeze_multi_modal_projector),
            Entry(key="freeze_language_model", value=job.freeze_language_model),
        ]
    return Section(title="Model and method", entries=tuple(entries))


def _method_entries(job: Job) -> list[Entry]:
    if job.finetuning == "full":
        return [Entry(key="finetuning_type", value="full")]
    if job.finetuning == "freeze":
        layers = job.freeze_trainable_layers
        which = f"the {'last' if layers > 0 else 'first'} {abs(layers)} layers are trained, and nothing else"
        return [
            Entry(key="finetuning_type", value="freeze"),
            Entry(key="freeze_trainable_layers", value=layers, comment=which),
        ]
    target = ",".join(job.lora_target)
    every = "every linear layer but the output layer" if target == "all" else ""
    entries = [
        Entry(key="finetuning_type", value="lora"),
        Entry(key="lora_rank", value=job.lora_rank or 8, comment="lora_alpha is twice this unless it is set"),
        Entry(key="lora_target", value=target, comment=every),
    ]
    if job.finetuning == "qlora":
        bits = job.quantization_bit or 4
        entries += [
            Entry(
                key="quantization_bit", value=bits, comment="each rank quantizes the bf16 weights when it loads them"
            ),
            Entry(key="quantization_method", value="bnb"),
        ]
        if bits == 4:
            comment = "the scales of the blocks are quantized too: 0.37 bits less a weight"
            entries.append(Entry(key="double_quantization", value=True, comment=comment))
    return entries


def _training_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    job = spec.job
    steps = training_steps(job, user.get("max_steps"))
    warmup = warmup_steps(steps)
    why = "a guess: the spec has no samples" if steps is None else f"3% of {steps} steps"
    entries = [
        Entry(key="num_train_epochs", value=float(job.epochs)),
        Entry(key="learning_rate", value=float(job.learning_rate)),
        Entry(key="lr_scheduler_type", value="cosine"),
        Entry(key="warmup_steps", value=warmup, comment=f"{why}; a whole number, for transformers 4 and 5"),
        *_precision_entries(job, layout),
        _optimizer_entry(job, layout),
        Entry(key="ddp_timeout", value=DDP_TIMEOUT_S, comment="s: tokenising must end in time, and a hang does"),
    ]
    return Section(title="Training", entries=tuple(entries))


def _precision_entries(job: Job, layout: Layout) -> list[Entry]:
    if job.pure_bf16:
        return [
            Entry(key="pure_bf16", value=True, comment="weights, gradients and Adam's moments in bf16; no fp32 copy")
        ]
    kept = {
        "ddp": "computed in it; what is trained is kept in fp32",
        "deepspeed": "weights and gradients; DeepSpeed keeps its copy in fp32",
        "fsdp2": "gathered weights and activations; the shards stay in fp32",
    }
    return [Entry(key=job.precision, value=True, comment=kept[layout.backend])]


def _optimizer_entry(job: Job, layout: Layout) -> Entry:
    if layout.offload_optimizer:
        comment = "DeepSpeed's CPU Adam takes its place, with these settings"
    elif job.optimizer == "adamw_8bit":
        comment = "both moments in 8 bits (bitsandbytes)"
    else:
        comment = "one kernel, without temporary copies"
    return Entry(key="optim", value=OPTIMIZERS[job.optimizer], comment=comment)


def _layout_section(spec: Spec, layout: Layout) -> Section:
    pairs = "pairs" if spec.job.sequences_per_sample > 1 else "sequences"
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    entries = [
        Entry(key="per_device_train_batch_size", value=layout.micro_batch_size),
        Entry(
            key="gradient_accumulation_steps",
            value=layout.gradient_accumulation_steps,
            comment=f"micro batch * this * {layout.dp} GPUs = {batch} {pairs} a step",
        ),
    ]
    notes: tuple[str, ...] = ()
    if layout.backend == "deepspeed":
        comment = "beside this file: the node scripts give its whole path"
        entries.append(Entry(key="deepspeed", value=deepspeed_json.FILE, comment=comment))
        title = f"Layout: ZeRO-{layout.zero_stage} over {layout.dp} GPUs"
    elif layout.backend == "fsdp2":
        notes = (f"FSDP2 is in {accelerate_yaml.FILE}, from which the node scripts start each process",)
        title = f"Layout: FSDP2 over {layout.dp} GPUs"
        if must_say_sync(layout):
            entries.append(Entry(key="accelerator_config", value=SYNC_EACH_BATCH, comment=WHY_SYNC))
    else:
        title = f"Layout: a whole model on each of {layout.dp} GPUs"
    return Section(title=title, entries=tuple(entries), notes=notes)


def _memory_section(spec: Spec, layout: Layout) -> Section:
    off = layout.recompute.granularity == "none"
    entries = [
        Entry(
            key="disable_gradient_checkpointing",
            value=off,
            comment="activations are kept"
            if off
            else "each layer is computed again in backward; LLaMA-Factory's default",
        ),
        Entry(key="flash_attn", value="auto", comment="PyTorch's own; fa2 needs the package flash-attn"),
    ]
    if layout.fused_linear_cross_entropy:
        comment = "the logits are never whole in memory"
        entries.append(Entry(key="enable_liger_kernel", value=True, comment=comment))
    return Section(title="Memory", entries=tuple(entries))


def _output_section(spec: Spec, user: Mapping[str, Any]) -> Section:
    steps = training_steps(spec.job, user.get("max_steps"))
    entries = [
        Entry(key="save_strategy", value="steps"),
        Entry(key="save_steps", value=save_steps(steps)),
        Entry(key="save_total_limit", value=2, comment="older ones of this run are removed"),
    ]
    if user.get("eval_strategy") == "steps":
        comment = "unset it follows logging_steps: after every step"
        entries.append(Entry(key="eval_steps", value=save_steps(steps), comment=comment))
    entries += [
        Entry(key="logging_steps", value=1),
        Entry(key="report_to", value="none", comment="or wandb, tensorboard"),
    ]
    return Section(title=OUTPUT_TITLE, entries=tuple(entries))
