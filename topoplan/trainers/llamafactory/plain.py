"""LLaMA-Factory on transformers, with DeepSpeed, FSDP2 or plain data parallelism: train.yaml and its run.

Sources: LLaMA-Factory hparams/, model/adapter.py and model/model_utils/, transformers training_args.py, at the versions
named in `topoplan/catalog/trainer_keys/llamafactory.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import listed
from topoplan.layout.layout import Layout
from topoplan.operators.adapters import ALPHA_PER_RANK, LORA_RANK
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import plain_checkpoint_size
from topoplan.trainers.codec import entries
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.llamafactory.common import (
    CACHING_ALLOCATOR,
    RECORD_VRAM,
    RESUME,
    RESUME_FROM,
    START,
    TRIAL,
    VERSIONS,
    beside,
    data_section,
    dataset_entry,
    evaluation_entries,
    launcher,
    model_section,
    run_of,
    training_section,
    versions_line,
)
from topoplan.trainers.llamafactory.key_list import trainer_versions
from topoplan.trainers.llamafactory.plain_job import CODEC, ROWS
from topoplan.trainers.llamafactory.plain_refusals import FREEZABLE_MODEL_TYPES, refusals, support_warnings
from topoplan.trainers.llamafactory.user_keys import OPTIMIZERS, user_keys
from topoplan.trainers.loading import loading_caveats
from topoplan.trainers.requirements import install_commands, requirements_of
from topoplan.trainers.sharding_files import ACCELERATE_FILE, DEEPSPEED_FILE, accelerate_text, deepspeed_text
from topoplan.trainers.steps import steps, training_steps
from topoplan.trainers.train_yaml import head, output_section, trainer_files, values_of, warmup_steps
from topoplan.trainers.trainer import ReadmeWords, TrainerFiles, TrainerRun, TrainingPath, torchrun_command
from topoplan.trainers.traits import SHARDED
from topoplan.trainers.yaml_text import Entry, Section


def plain_trainer_files(spec: Spec, layout: Layout) -> TrainerFiles:
    """Write train.yaml, and ds_config.json or accelerate.yaml if the backend needs one.

    Raises SpecError for a user's key that contradicts the layout.
    """
    warnings = [*support_warnings(spec, layout)]
    user = user_keys(spec, layout, written_keys(spec, layout), warnings, "plain")
    further = {DEEPSPEED_FILE: deepspeed_text(layout)} if layout.backend == "deepspeed" else {}
    further |= {ACCELERATE_FILE: accelerate_text(spec, layout)} if layout.backend == "fsdp2" else {}
    return trainer_files(
        spec,
        layout,
        _sections(spec, layout, user),
        user=user,
        head=head(spec, layout, f"LLaMA-Factory {trainer_versions()['llamafactory']}, {versions_line()}"),
        warnings=warnings,
        further=further,
    )


def written_keys(spec: Spec, layout: Layout) -> dict[str, Any]:
    """Return what train.yaml contains without the user's keys."""
    return values_of(_sections(spec, layout, {}))


def _sections(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> list[Section]:
    steps = training_steps(spec.job, user.get("max_steps"))
    why = "a guess, because the spec has no samples" if steps is None else f"3% of {steps} steps"
    where = "a directory on every node"
    further = (*_precision_entries(spec.job, layout), _optimizer_entry(spec.job, layout))
    memory = entries(ROWS, ("disable_gradient_checkpointing", "enable_liger_kernel"), spec, layout)
    memory.insert(1, Entry("flash_attn", "auto", "PyTorch's attention; fa2 needs the package flash-attn"))
    return [
        model_section(spec, FREEZABLE_MODEL_TYPES, where, *_method_entries(spec.job)),
        data_section(spec, "shuffled in each epoch"),
        training_section(spec, user, warmup_steps(steps), why, *further),
        _layout_section(spec, layout),
        Section(title="Memory", entries=tuple(memory)),
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
    target, rank = ",".join(job.lora_target), job.lora_rank or LORA_RANK
    lines = [
        Entry("finetuning_type", "lora"),
        Entry("lora_rank", rank),
        Entry("lora_alpha", ALPHA_PER_RANK * rank, "twice the rank, with every trainer"),
        Entry("lora_dropout", job.lora_dropout or 0.0),
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


# What a run needs -----------------------------------------------------------------------------------------------------

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
    backend, use_mca = layout.backend, EnvVar("USE_MCA", "0", "train without Megatron-core, whatever the shell sets")
    optional = {
        "deepspeed": backend == "deepspeed",
        "bitsandbytes": values.get("quantization_bit") is not None or "8bit" in str(values.get("optim")),
        "liger-kernel": bool(values.get("enable_liger_kernel")),
    }
    wanted = {"torch": "", "llamafactory": f"=={trainer_versions()['llamafactory']}", "accelerate": "", "peft": ""}
    wanted |= {"transformers": ">=5"} if layout.experts_impl == "grouped_mm" else {}
    wanted |= dict.fromkeys((name for name, needed in optional.items() if needed), "")
    requirements = requirements_of(spec, layout, VERSIONS, wanted)
    files = {
        "ddp": (),
        "deepspeed": ((DEEPSPEED_FILE, "DeepSpeed's configuration; `auto` values are filled in from `train.yaml`"),),
        "fsdp2": ((ACCELERATE_FILE, "accelerate's configuration for FSDP2"),),
    }[backend]
    return run_of(
        spec,
        values,
        steps(spec.job, values),
        requirements=requirements,
        environment=(use_mca, RECORD_VRAM, *((CACHING_ALLOCATOR,) if layout.expandable_segments else ())),
        refuses_quantized=None
        if values.get("finetuning_type") == "lora"
        else (
            "Quantized weights cannot be trained.",
            "are quantized, so only adapters (LoRA) can be trained on them; use an unquantized model",
        ),
        checkpoint=plain_checkpoint_size(spec, layout, values),
        readme=ReadmeWords(
            engine=f"LLaMA-Factory on {_ENGINES.get(backend, f'DeepSpeed ZeRO-{layout.zero_stage}')}",
            packages=listed(["LLaMA-Factory", *(title for name, title in _NAMES.items() if optional[name])]),
            install=install_commands(requirements, brought=("accelerate", "peft")),
            dataset_entry=dataset_entry(spec.job, spec.model),
            progress=_PROGRESS,
            resume=RESUME,
            files=files,
        ),
    )


def _start(spec: Spec, layout: Layout, node: int) -> str:
    if layout.backend == "fsdp2":
        cluster = spec.cluster
        return f"""\
{_ACCELERATE_START}{RESUME_FROM}\
exec "$python" -m accelerate.commands.launch --config_file "$bundle_dir/{ACCELERATE_FILE}" \\
  --num_machines {cluster.nodes} --machine_rank {node} --num_processes {cluster.world_size} \\
  --main_process_ip "$master_addr" --main_process_port "$master_port" \\
  --max_restarts 0 --log_dir "$log_dir" --tee 3 \\
  {launcher(spec.job)}
"""
    if layout.backend == "deepspeed":
        words = launcher(spec.job, beside("deepspeed", DEEPSPEED_FILE))
        return _DEEPSPEED_START + RESUME_FROM + torchrun_command(spec, node, words)
    return START + torchrun_command(spec, node, launcher(spec.job))


def _accelerate_command(spec: Spec, node: int) -> str:
    cluster = spec.cluster
    return f"""\
exec "$python" -m accelerate.commands.launch --config_file "$bundle_dir/{ACCELERATE_FILE}" \\
  --num_machines {cluster.nodes} --machine_rank {node} --num_processes {cluster.world_size} \\
  --main_process_ip "$master_addr" --main_process_port "$master_port" \\
  --max_restarts 0 --log_dir "$log_dir" --tee 3 \\
  {launcher(spec.job)}
"""


PLAIN = TrainingPath(
    backends=tuple(SHARDED),
    traits=SHARDED,
    packages={"ddp": (), "deepspeed": ("DeepSpeed",), "fsdp2": ()},
    caveats=loading_caveats,
    refusals=refusals,
    steps=steps,
    files=plain_trainer_files,
    run=plain_run,
    start=_start,
    versions=lambda: {name: trainer_versions()[name] for name in ("llamafactory", "transformers")},
    trial=TRIAL,
    codec=CODEC,
)
