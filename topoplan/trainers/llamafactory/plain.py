"""LLaMA-Factory on transformers: what a run with DeepSpeed, FSDP2 or plain data parallelism needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import listed
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import plain_checkpoint_size
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
from topoplan.trainers.llamafactory.plain_job import CODEC
from topoplan.trainers.llamafactory.plain_refusals import refusals
from topoplan.trainers.llamafactory.plain_yaml import plain_trainer_files
from topoplan.trainers.requirements import Requirement, install_commands, requirements_of
from topoplan.trainers.sharding_files import ACCELERATE_FILE, DEEPSPEED_FILE
from topoplan.trainers.steps import pauses_of, steps
from topoplan.trainers.trainer import ReadmeWords, TrainerRun, TrainingPath, torchrun_command
from topoplan.trainers.traits import SHARDED

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
