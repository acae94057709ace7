"""LLaMA-Factory on transformers: what a run with DeepSpeed, FSDP2 or plain data parallelism needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import listed
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import plain_checkpoint_size
from topoplan.trainers.codec import entries
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.llamafactory.common import (
    CACHING_ALLOCATOR,
    CHECKPOINTS,
    RECORD_VRAM,
    RESUME,
    RESUME_FROM,
    TRIAL,
    VERSIONS,
    beside,
    dataset_directory,
    dataset_entry,
    launcher,
)
from topoplan.trainers.llamafactory.key_list import trainer_versions
from topoplan.trainers.llamafactory.plain_job import CODEC, ROWS
from topoplan.trainers.llamafactory.plain_refusals import FREEZABLE_MODEL_TYPES, refusals, support_warnings
from topoplan.trainers.llamafactory.sections import (
    data_section,
    evaluation_entries,
    model_section,
    training_section,
    versions_line,
)
from topoplan.trainers.llamafactory.user_keys import OPTIMIZERS, user_keys
from topoplan.trainers.requirements import Requirement, install_commands, requirements_of
from topoplan.trainers.sharding_files import ACCELERATE_FILE, DEEPSPEED_FILE, accelerate_text, deepspeed_text
from topoplan.trainers.steps import pauses_of, steps, training_steps
from topoplan.trainers.train_yaml import head, output_section, trainer_files, values_of
from topoplan.trainers.trainer import ReadmeWords, TrainerFiles, TrainerRun, TrainingPath, torchrun_command
from topoplan.trainers.traits import SHARDED
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


_START = """\
# torchrun starts the launcher module directly: `llamafactory-cli train` would start another torchrun in each process.
# exec, so that signals reach torchrun, which stops its workers.
"""
_DEEPSPEED_START = """\
# torchrun starts the launcher module directly: `llamafactory-cli train` would start another torchrun in each process.
# The arguments after train.yaml override its keys and are parsed as YAML: without them, the trainer would look for
# ds_config.json in its working directory. exec, so that signals reach torchrun, which stops its workers.
"""
_ACCELERATE_START = """\
# accelerate turns its configuration into environment variables and runs torchrun in its own process, which starts the
# launcher module directly: `llamafactory-cli train` would start another torchrun in each process. exec, so that signals
# reach it.
"""
_PROGRESS = """\
Then every step prints a line with `loss` and `grad_norm`, and
`trainer_log.jsonl` in `output_dir` shows the remaining time."""

_NAMES = {"deepspeed": "DeepSpeed", "bitsandbytes": "bitsandbytes", "liger-kernel": "Liger kernels"}
"""Packages that not every run needs, with their names in the README."""
_ENGINES = {"ddp": "plain data parallel training", "fsdp2": "FSDP2 (accelerate)"}


def plain_run(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    """Return what a run with these keys needs on a node."""
    requirements = _requirements(spec, layout, values)
    return TrainerRun(
        model_dir=str(values["model_name_or_path"]),
        output_dir=str(values["output_dir"]),
        dataset=str(values["dataset"]),
        dataset_dir=dataset_directory(values),
        to_fill_in="dataset",
        requirements=requirements,
        environment=_environment(layout),
        refuses_quantized=None
        if values.get("finetuning_type") == "lora"
        else (
            "Quantized weights cannot be trained.",
            "are quantized, so only adapters (LoRA) can be trained on them; use an unquantized model",
        ),
        checkpoint=plain_checkpoint_size(spec, layout, values),
        checkpoints=CHECKPOINTS,
        steps=(count := steps(spec.job, values)),
        pauses=pauses_of(values, spec.job, count),
        readme=_readme(spec, layout, requirements),
    )


def _requirements(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> tuple[Requirement, ...]:
    further = {
        "deepspeed": layout.backend == "deepspeed",
        "bitsandbytes": values.get("quantization_bit") is not None or "8bit" in str(values.get("optim")),
        "liger-kernel": bool(values.get("enable_liger_kernel")),
    }
    wanted = {"torch": "", "llamafactory": f"=={trainer_versions()['llamafactory']}", "accelerate": "", "peft": ""}
    wanted |= {"transformers": ">=5"} if layout.experts_impl == "grouped_mm" else {}
    wanted |= dict.fromkeys((name for name, needed in further.items() if needed), "")
    return requirements_of(spec, layout, VERSIONS, wanted)


def _environment(layout: Layout) -> tuple[EnvVar, ...]:
    found = [
        EnvVar(name="USE_MCA", value="0", reason="train without Megatron-core, whatever the shell sets"),
        RECORD_VRAM,
    ]
    if layout.expandable_segments:
        found.append(CACHING_ALLOCATOR)
    return tuple(found)


def _readme(spec: Spec, layout: Layout, requirements: tuple[Requirement, ...]) -> ReadmeWords:
    words = ["LLaMA-Factory", *(_NAMES[one.package.name] for one in requirements if one.package.name in _NAMES)]
    engine = _ENGINES.get(layout.backend, f"DeepSpeed ZeRO-{layout.zero_stage}")
    files = {
        "deepspeed": ((DEEPSPEED_FILE, "DeepSpeed's configuration; `auto` values are filled in from `train.yaml`"),),
        "fsdp2": ((ACCELERATE_FILE, "accelerate's configuration for FSDP2"),),
    }
    return ReadmeWords(
        engine=f"LLaMA-Factory on {engine}",
        packages=listed(words),
        install=install_commands(requirements, brought=("accelerate", "peft")),
        dataset_entry=dataset_entry(spec.job, spec.model),
        progress=_PROGRESS,
        resume=RESUME,
        files=files.get(layout.backend, ()),
    )


def _start(spec: Spec, layout: Layout, node: int) -> str:
    if layout.backend == "fsdp2":
        return _ACCELERATE_START + RESUME_FROM + _accelerate_command(spec, node)
    if layout.backend == "deepspeed":
        words = launcher(spec.job, beside("deepspeed", DEEPSPEED_FILE))
        return _DEEPSPEED_START + RESUME_FROM + torchrun_command(spec, node, words)
    return _START + RESUME_FROM + torchrun_command(spec, node, launcher(spec.job))


def _accelerate_command(spec: Spec, node: int) -> str:
    cluster = spec.cluster
    return f"""\
exec "$python" -m accelerate.commands.launch --config_file "$bundle_dir/{ACCELERATE_FILE}" \\
  --num_machines {cluster.nodes} --machine_rank {node} --num_processes {cluster.world_size} \\
  --main_process_ip "$master_addr" --main_process_port "$master_port" \\
  --max_restarts 0 --log_dir "$log_dir" --tee 3 \\
  {launcher(spec.job)}
"""


def _versions() -> Mapping[str, Any]:
    return {name: trainer_versions()[name] for name in ("llamafactory", "transformers")}


PLAIN = TrainingPath(
    backends=tuple(SHARDED),
    traits=SHARDED,
    packages={"ddp": (), "deepspeed": ("DeepSpeed",), "fsdp2": ()},
    refusals=refusals,
    steps=steps,
    files=plain_trainer_files,
    run=plain_run,
    start=_start,
    versions=_versions,
    trial=TRIAL,
    codec=CODEC,
)
