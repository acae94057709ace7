"""Trinity-RFT: FSDP2 layouts, started on a Ray cluster of the nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.operators.params import parameter_count
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.log import Log, loss_key, value_of
from topoplan.trainers.requirements import Versions, requirements_of
from topoplan.trainers.steps import Pauses
from topoplan.trainers.templating import render
from topoplan.trainers.trainer import Checkpoints, ReadmeWords, Trainer, TrainerRun, TrainingPath
from topoplan.trainers.trials import DIRECTORY, is_generated
from topoplan.trainers.trinity import traits
from topoplan.trainers.trinity.document import (
    ROPE_THETA,
    SAMPLES,
    TRIAL,
    output_directory,
    rope_scaling,
    training_steps,
    trinity_files,
)
from topoplan.trainers.trinity.job import CODEC, RECOGNIZED
from topoplan.trainers.trinity.refusals import TRINITY, VERL, refusals

_EXPANDABLE = EnvVar(
    "PYTORCH_CUDA_ALLOC_CONF",
    "expandable_segments:True",
    "less fragmentation; Ray's workers inherit it from here, so before ray start",
)
_VERSIONS = Versions(title="Trinity-RFT")
_DATA_NOTE = """\
It is read with `datasets.load_dataset`: each sample has `messages`, a list of
   `{"role": ..., "content": ...}`. Name another key in `format`. A sample longer than `max_model_len` stops the run."""
_PROGRESS = """\
From then on every step prints a line `Step N: {...}` with
`actor/sft_loss`. What TensorBoard shows lies in `monitor` below `output_dir`, the trainer's own log in `log`."""
_TOKEN = """
   Ray asks for a token where the user of node 0 has one (`~/.ray/auth_token`); then all nodes need the same."""
_RESUME = """\
start the same again: the trainer takes the newest whole checkpoint in `output_dir`."""

# verl_legacy/fsdp_workers.py imports vllm even if nothing is generated.
_PACKAGES = ("torch", "ray", "trinity-rft", "verl", "vllm", "flash-attn", "omegaconf")

# Requirements missing from the packages' metadata: SQLAlchemy 2.1 needs greenlet for its asyncio part, and pyarrow 26
# needs NumPy 2, which verl does not allow.
_INSTALL = (
    f"pip install 'trinity-rft[vllm]=={TRINITY}' 'pyarrow<26' greenlet",
    f"pip install --no-deps verl=={VERL}",
    "pip install flash-attn --no-build-isolation",
)


def trinity_run(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    """Return what a run with these keys needs on a node."""
    data = values["buffer"]["trainer_input"]["experience_buffer"]
    dataset = str(data["path"])
    return TrainerRun(
        model_dir=str(values["model"]["model_path"]),
        output_dir=output_directory(values),
        dataset=dataset,
        dataset_files=(dataset,) if dataset.startswith((".", "/")) else (),
        to_fill_in="      path",
        requirements=requirements_of(spec, layout, _VERSIONS, dict.fromkeys(_PACKAGES, "")),
        environment=(_EXPANDABLE,) if layout.expandable_segments else (),
        refuses_quantized=(
            "Weights that are quantized cannot be trained themselves.",
            "are quantized; take an unquantized model",
        ),
        checkpoint=_checkpoint(spec, values),
        # trainer/verl_trainer.py, save_checkpoint; verl's find_latest_ckpt_path reads the tracker file.
        checkpoints=Checkpoints(directories="global_step_", tracker="latest_checkpointed_iteration.txt"),
        steps=training_steps(spec.job),
        pauses=Pauses(save_every=values["trainer"].get("save_interval"), save_key="trainer.save_interval"),
        readme=ReadmeWords(
            engine=f"Trinity-RFT {TRINITY} (verl, FSDP2)",
            packages="Trinity-RFT, verl, vLLM and FlashAttention",
            install=_INSTALL,
            data_note=_DATA_NOTE + (_TOKEN if spec.cluster.nodes > 1 else ""),
            dataset_words="to a directory, or to a dataset id of the hub",
            progress=_PROGRESS,
            resume=_RESUME,
        ),
    )


def _checkpoint(spec: Spec, values: Mapping[str, Any]) -> CheckpointSize:
    """Return checkpoint sizes: fp32 shards of weights and two moments, and Hugging Face's bf16 weights at the end.

    Source: `trainer/verl_legacy/fsdp_checkpoint_manager.py`, save_checkpoint.
    """
    parameters, trainer = parameter_count(spec.model), values["trainer"]
    kept = int(trainer.get("max_checkpoints_to_keep") or 0)
    return CheckpointSize(
        megatron_bytes=0,
        hf_bytes=2 * parameters if trainer.get("save_hf_checkpoint") != "never" else 0,
        optimizer_bytes=12 * parameters,
        at_once=kept + 1 if kept else None,
    )


_WAIT_S = 900
"""The timeout of torchrun's rendezvous."""


def _start(spec: Spec, layout: Layout, node: int) -> str:
    context = {
        "is_head": node == 0,
        "scales_positions": rope_scaling(spec.model, spec.job.seq_len) is not None,
        "gpus_per_node": spec.cluster.gpus_per_node,
        "world_size": layout.world_size,
        "verl": VERL,
        "wait_s": _WAIT_S,
        "theta": ROPE_THETA,
        "samples": SAMPLES if is_generated(spec.job) else "",
        "directory": DIRECTORY,
    }
    return render("trinity/start.sh.j2", context)


_LOG = Log(
    loss=loss_key("actor/sft_loss"),
    steps=re.compile(r"\bStep (?P<step>[0-9]{1,12}): \{"),
    step_time=value_of("time/train_step", "s"),
    data_time=value_of("time/read_experience", "s"),
    allocated=value_of("perf/max_memory_allocated_gb", "gib"),
    reserved=value_of("perf/max_memory_reserved_gb", "gib"),
)
"""Trinity-RFT draws no progress bar. The trainer's actor prints `Step N: {...}`, which Ray forwards to node 0
(trinity/utils/monitor.py, format_data_str)."""

_FSDP2 = TrainingPath(
    backends=("fsdp2",),
    traits={"fsdp2": traits.TRINITY},
    packages={"fsdp2": ("verl", "Ray")},
    refusals=refusals,
    steps=lambda job, keys: training_steps(job),
    files=trinity_files,
    run=trinity_run,
    start=_start,
    versions=lambda: {"trinity-rft": TRINITY, "verl": VERL},
    trial=TRIAL,
    codec=CODEC,
)
TRINITY_RFT = Trainer(
    name="trinity",
    title=_VERSIONS.title,
    training_paths=(_FSDP2,),
    log=_LOG,
    versions=_VERSIONS,
    recognizers=(RECOGNIZED,),
    rules="topoplan.trainers.trinity.rules",
)
