"""LLaMA-Factory on Megatron-core (MCA): what a run needs; train.yaml itself is written by `mca_yaml.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from topoplan.engines.megatron.states import stage_parameters
from topoplan.layout.layout import Layout, changed
from topoplan.specs.case import case_with
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.llamafactory.common import (
    CACHING_ALLOCATOR,
    CHECKPOINTS,
    RECORD_VRAM,
    RESUME,
    RESUME_FROM,
    TRIAL,
    VERSIONS,
    dataset_directory,
    dataset_entry,
    launcher,
)
from topoplan.trainers.llamafactory.key_list import templates, trainer_versions
from topoplan.trainers.llamafactory.mca_job import CODEC
from topoplan.trainers.llamafactory.mca_refusals import caveats, job_refusals, refusals, resumable
from topoplan.trainers.llamafactory.mca_yaml import trainer_file
from topoplan.trainers.requirements import Requirement, install_commands, requirements_of
from topoplan.trainers.steps import megatron_steps, pauses_of, step_limit
from topoplan.trainers.trainer import ReadmeWords, TrainerRun, TrainingPath, torchrun_command
from topoplan.trainers.traits import MCA

_START = (
    """\
# torchrun starts the launcher module directly: `llamafactory-cli train` would start another torchrun in each process.
# exec, so that signals reach torchrun, which stops its workers.
"""
    + RESUME_FROM
)

_NO_RESUME = """\
the adapter cannot resume from the checkpoints of this layout (torch_dist, because etp differs from tp).
  Generate the bundle again with the last checkpoint as `model_name_or_path` under `job.trainer`, or set it and another
  `output_dir` in `train.yaml` and in the scripts. The weights are kept; optimizer and data start from scratch."""
_PROGRESS = """\
Then every step prints a line with `loss`, `grad_norm` and
`token_per_sec_per_gpu`, and `trainer_log.jsonl` in `output_dir` shows the remaining time."""


def trainer_run(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    """Return what a run with these keys needs on a node."""
    requirements = _requirements(spec, layout, values)
    can_resume = resumable(spec, layout)
    return TrainerRun(
        model_dir=str(values["model_name_or_path"]),
        output_dir=str(values["output_dir"]),
        dataset=str(values["dataset"]),
        dataset_dir=dataset_directory(values),
        to_fill_in="dataset",
        requirements=requirements,
        environment=_environment(spec.cluster, layout),
        model_files=("config.json", "mca_config.json"),
        refuses_quantized=(
            "The adapter does not know the scales of quantized weights, and fails at the first one.",
            "are quantized, which the trainer cannot read; convert them to bf16, or use an unquantized model",
        ),
        checkpoint=checkpoint_size(spec, layout, values),
        checkpoints=CHECKPOINTS._replace(resumable=can_resume),
        steps=(count := _steps(spec.job, values)),
        pauses=pauses_of(values, spec.job, count),
        readme=_readme(spec, requirements, can_resume=can_resume),
    )


def _requirements(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> tuple[Requirement, ...]:
    versions = trainer_versions()
    wanted = {
        "torch": "",
        "llamafactory": f"=={versions['llamafactory']}",
        "megatron-core": f"=={versions['megatron_core']}",
        "transformer-engine": "",
        "mcore_adapter": "",
    }
    if values.get("transformer_impl") == "local":
        del wanted["transformer-engine"]
    return requirements_of(spec, layout, VERSIONS, wanted)


def _environment(cluster: Cluster, layout: Layout) -> tuple[EnvVar, ...]:
    found = [EnvVar(name="USE_MCA", value="1", reason="train with Megatron-core, through mcore_adapter")]
    if cluster.gpu.architecture != "blackwell" and (layout.tp > 1 or layout.cp > 1):
        # Megatron-LM asserts this in training/arguments.py, which the adapter bypasses.
        reason = "runs kernels in launch order, which the overlap of TP and CP needs before Blackwell"
        found.append(EnvVar(name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", reason=reason))
    return (*found, RECORD_VRAM, CACHING_ALLOCATOR)


def _readme(spec: Spec, requirements: tuple[Requirement, ...], *, can_resume: bool) -> ReadmeWords:
    return ReadmeWords(
        engine="LLaMA-Factory on Megatron-core (mcore_adapter)",
        packages="LLaMA-Factory, megatron-core, Transformer Engine and\n"
        "   [mcore_adapter](https://github.com/alibaba/ROLL/tree/main/mcore_adapter)",
        install=install_commands(requirements),
        model_note="The adapter cannot load hub ids.",
        data_note="This trainer reads samples in order, so shuffle them beforehand."
        " It fills up the last batch of an epoch with the first samples.",
        dataset_entry=dataset_entry(spec.job, spec.model),
        progress=_PROGRESS,
        resume=RESUME if can_resume else _NO_RESUME,
    )


def _start(spec: Spec, layout: Layout, node: int) -> str:
    return _START + torchrun_command(spec, node, launcher(spec.job))


def _steps(job: Job, keys: Mapping[str, Any]) -> int | None:
    return megatron_steps(job, step_limit(keys, "max_steps"))


def _model_warnings(model: Model) -> Iterator[str]:
    if model.model_type not in templates().supported_model_types:
        yield f"the MCA trainer does not support model_type {model.model_type!r}"
    if model.model_type == "qwen3_next":
        yield "mcore_adapter 0.10 cannot build Qwen3-Next on megatron-core 0.15.3 to 0.16.1: try the trainer first"


MEGATRON = TrainingPath(
    backends=("mca",),
    traits={"mca": MCA},
    packages={"mca": ("megatron-core", "mcore_adapter", "Transformer Engine")},
    job_refusals=job_refusals,
    model_warnings=_model_warnings,
    caveats=caveats,
    refusals=refusals,
    steps=_steps,
    files=trainer_file,
    run=trainer_run,
    start=_start,
    versions=trainer_versions,
    trial=TRIAL,
    codec=CODEC,
)


_WEIGHT_BYTES = 2  # bf16 or fp16
_STATE_BYTES = {"adam": 12, "sgd": 8}  # fp32: the weight, and two moments or one


def checkpoint_size(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> CheckpointSize:
    """Return the checkpoint sizes of a run with these trainer keys.

    mcore_adapter trainer/trainer.py, save_model and _save_optimizer_and_scheduler; checkpointing.py,
    save_config_and_state_dict: a legacy checkpoint has the files of all ranks with expert data-parallel rank 0, and
    therefore the non-expert weights once per expert-parallel rank. Megatron-core distrib_optimizer.py: the distributed
    optimizer saves every element once, in fp32.
    """
    all_trained = replace(
        spec.job, freeze_language_model=False, freeze_vision_tower=False, freeze_multi_modal_projector=False
    )
    one = changed(layout, tp=1, pp=1, vpp=1, ep=1, etp=1, pipeline_layout=None)
    every = stage_parameters(case_with(replace(spec, job=all_trained), MCA), one, 0)
    trained = stage_parameters(case_with(spec, MCA), one, 0)
    copies = 1 if values.get("ckpt_format") == "torch_dist" or not resumable(spec, layout) else layout.ep
    to_hf = bool(values.get("save_hf_model"))
    weights_alone = bool(values.get("save_only_model"))
    state = 0 if weights_alone else _STATE_BYTES[str(values.get("optimizer", "adam"))]
    state_copies = 1 if layout.distributed_optimizer else layout.ep
    limit = values.get("save_total_limit")
    return CheckpointSize(
        megatron_bytes=0 if weights_alone and to_hf else _WEIGHT_BYTES * (every.expert + copies * every.dense),
        hf_bytes=_WEIGHT_BYTES * every.total if to_hf else 0,
        optimizer_bytes=state * (trained.expert + state_copies * trained.dense),
        at_once=0 if values.get("save_strategy") == "no" else None if limit is None else max(1, int(limit)) + 1,
    )
