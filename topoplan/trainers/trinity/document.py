"""train.yaml for Trinity-RFT: the plan in its keys, each with its reason; long contexts; trials.

The job is Trinity-RFT's SFT (`mode: train`, which needs no explorer and gives the trainer all GPUs). The blocks `model`
and `trainer` can also be used for reinforcement learning. Sources: Trinity-RFT 0.6.0 `common/config.py`,
`algorithm/algorithm.py` (SFTAlgorithm), `buffer/reader/file_reader.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from topoplan.errors import SpecError, nearest
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers import trials
from topoplan.trainers.models import model_directory
from topoplan.trainers.train_yaml import place_of, run_name, save_steps, warmup_steps
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, MAIN_FILE, TrainerFiles
from topoplan.trainers.trinity.refusals import TRINITY, VERL
from topoplan.trainers.yaml_text import Entry, Section, mapping_text

PROJECT = "topoplan"
CHECKPOINT_ROOT = "saves"
_NEVER = 2**31 - 1
_CORES_A_GPU = 3
"""One per worker that might share the GPU (verl 0.7.1 `trainer/ppo/ray_trainer.py`, max_colocate_count)."""
_OWN = (
    *("mode", "project", "group", "name"),
    *("algorithm.algorithm_type", "algorithm.repeat_times", "cluster", "model.max_model_len", "model.rope_scaling"),
    *("buffer.batch_size", "buffer.train_batch_size", "buffer.total_epochs", "buffer.total_steps"),
    *("trainer.trainer_type", "trainer.trainer_strategy", "trainer.ulysses_sequence_parallel_size"),
    *("trainer.max_token_len_per_gpu", "trainer.use_dynamic_bsz", "trainer.use_remove_padding"),
    *("trainer.offload_policy", "trainer.param_offload", "trainer.optimizer_offload", "trainer.trainer_config"),
)
"""Keys and blocks that the spec and the plan decide."""
_BLOCKS = (
    *("checkpoint_root_dir", "continue_from_checkpoint", "ignore_validator_suggestions", "algorithm", "model"),
    *("buffer", "trainer", "monitor", "synchronizer", "log", "data_processor", "service"),
)
"""Blocks to which users may add keys: the blocks of Config that a run in mode train reads."""


def trinity_files(spec: Spec, layout: Layout) -> TrainerFiles:
    """Write train.yaml. Raises SpecError for a user's key that contradicts the plan."""
    document = _merged(_document(spec, layout), spec)
    name = run_name(spec.model, layout.id, [spec.cluster.world_size, document])
    document = {"mode": document["mode"], "project": PROJECT, "name": name, **document}
    head = (
        f"{spec.model.name} on {spec.cluster.name}: plan {layout.id}",
        f"For Trinity-RFT {TRINITY} with verl {VERL}.",
        "Relative paths are relative to the directory in which the node scripts start the trainer.",
        "The blocks model and trainer also suit a reinforcement-learning run with as many GPUs for its trainer.",
    )
    return TrainerFiles(
        files={MAIN_FILE: mapping_text(head, _sections(document, _reasons(spec, layout)))},
        values=document,
        run_name=name,
        warnings=tuple(_warnings(spec, layout)),
    )


def output_directory(values: Mapping[str, Any]) -> str:
    """Return the directory of checkpoints; Trinity-RFT `common/config.py`, get_checkpoint_job_dir."""
    parts = (values["checkpoint_root_dir"], values["project"], values.get("group") or "", values["name"])
    return str(PurePosixPath(*map(str, parts)))


def training_steps(job: Job) -> int | None:
    """Return the optimizer steps of the job; None if the spec does not give the number of samples.

    The reader treats all epochs as one sequence of samples and drops the last incomplete batch (_HFBatchReader).
    """
    return None if job.samples is None else max(1, math.floor(job.samples * job.epochs / job.global_batch_size))


def _document(spec: Spec, layout: Layout) -> dict[str, Any]:
    job, cluster = spec.job, spec.cluster
    steps = training_steps(job)
    rope = rope_scaling(spec.model, job.seq_len)
    model: dict[str, Any] = {"model_path": model_directory(spec.model), "max_model_len": job.seq_len}
    if rope is not None:
        model["rope_scaling"] = rope
    generated = f"${{oc.env:{SAMPLES}}}" if trials.is_generated(job) else ""
    length = {"total_epochs": int(job.epochs)} if job.epochs % 1 == 0 else {"total_steps": steps}
    return {
        "mode": "train",
        "checkpoint_root_dir": CHECKPOINT_ROOT,
        "continue_from_checkpoint": True,
        "algorithm": {
            "algorithm_type": "sft",
            "optimizer": {
                "lr": float(job.learning_rate),
                "lr_scheduler_type": "constant",
                "lr_warmup_steps": warmup_steps(steps),
            },
        },
        "model": model,
        "cluster": {"node_num": cluster.nodes, "gpu_per_node": cluster.gpus_per_node},
        "buffer": {
            "batch_size": job.global_batch_size,
            "train_batch_size": job.global_batch_size,
            **length,
            "trainer_input": {
                "experience_buffer": {
                    "name": "samples",
                    "storage_type": "file",
                    "path": generated or job.dataset or DATASET_TO_FILL_IN,
                    "split": "train",
                    "format": {"prompt_type": "messages", "messages_key": "messages"},
                }
            },
        },
        "trainer": _trainer(layout, job, steps, cluster.gpus_per_node),
        "synchronizer": {"sync_method": "checkpoint", "sync_interval": _NEVER},
        "monitor": {"monitor_type": "tensorboard"},
    }


def _trainer(layout: Layout, job: Job, steps: int | None, gpus_per_node: int) -> dict[str, Any]:
    block: dict[str, Any] = {
        "trainer_type": "verl",
        "trainer_strategy": "fsdp2",
        "ulysses_sequence_parallel_size": layout.ulysses,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": math.ceil(layout.micro_batch_size * job.seq_len / layout.ulysses),
        "use_remove_padding": True,
        "offload_policy": layout.offload,
        "param_offload": layout.offload,
        "optimizer_offload": layout.offload,
        "grad_clip": 1.0,
        "save_interval": save_steps(steps),
        "max_checkpoints_to_keep": 2,
        "save_hf_checkpoint": "never" if layout.offload else "last",
    }
    # Settings without a Trinity-RFT key, in verl's own keys.
    verl: dict[str, Any] = {}
    if layout.recompute.granularity == "none":
        verl["model"] = {"enable_gradient_checkpointing": False}
    if layout.sharding == "hybrid":
        verl["actor"] = {"fsdp_config": {"fsdp_size": min(layout.world_size, gpus_per_node)}}
    return {**block, "trainer_config": {"actor_rollout_ref": verl}} if verl else block


def _reasons(spec: Spec, layout: Layout) -> dict[str, str]:
    job, own = spec.job, spec.model.max_position_embeddings
    gpus = f"{layout.world_size} GPUs"
    return {
        "mode": "no explorer: all GPUs train",
        "continue_from_checkpoint": "a checkpoint of this name is resumed automatically",
        "algorithm.optimizer.lr_warmup_steps": "3% of the steps"
        if job.samples
        else "a guess, because the spec has no samples",
        "model.model_path": "a directory on every node",
        "model.max_model_len": "longer samples stop the run: remove them from the data set",
        "model.rope_scaling.rope_theta": "from the model's config.json, read by the node scripts",
        "model.rope_scaling": f"YaRN: {job.seq_len:,} tokens; the model's own context is {own:,}",
        "buffer.train_batch_size": f"dp {layout.dp} x {job.global_batch_size // layout.dp} sequences",
        "buffer.trainer_input.experience_buffer.path": "a directory, or a dataset id of the hub"
        if job.dataset
        else "to be filled in: a directory, or a dataset id of the hub (the spec has no dataset)",
        "trainer.trainer_strategy": f"FSDP2 over {gpus}, fp32 shards, bf16 computation",
        "trainer.trainer_config.actor_rollout_ref.actor.fsdp_config.fsdp_size": "shards in a node, copies across nodes",
        "trainer.ulysses_sequence_parallel_size": f"dp is {gpus} / {layout.ulysses} = {layout.dp}",
        "trainer.max_token_len_per_gpu": f"{layout.micro_batch_size} x {job.seq_len} / {layout.ulysses}; the default is"
        " twice the longest sequence",
        "trainer.offload_policy": "parameters, gradients and optimizer in host memory"
        if layout.offload
        else "all on the GPUs",
        "trainer.save_hf_checkpoint": "would gather the whole model; `trinity convert` creates one later"
        if layout.offload
        else "at the end",
        "synchronizer.sync_interval": "no explorer waits for weights",
    }


def _warnings(spec: Spec, layout: Layout) -> Iterator[str]:
    if rope_scaling(spec.model, spec.job.seq_len) is not None:
        own = spec.model.max_position_embeddings
        yield (
            f"Sequences of {spec.job.seq_len:,} tokens exceed the model's own {own:,}: positions are scaled with YaRN,"
            f" which Trinity-RFT {TRINITY} passes to the trainer only with verl below 0.8; the node scripts check"
            " that."
        )
    cores, gpus = spec.cluster.cpu_cores, spec.cluster.gpus_per_node
    if cores is not None and cores < _CORES_A_GPU * gpus:
        yield (
            f"verl requests {_CORES_A_GPU} CPU cores per GPU from Ray and waits for them, but a node has {cores} for"
            f" {gpus} GPUs."
        )
    if layout.micro_batch_size * spec.job.seq_len % layout.ulysses:
        yield "The tokens of a micro batch are not divisible by the Ulysses degree; verl pads them."


# The user's keys -----------------------------------------------------------------------------------------------------


def _merged(document: dict[str, Any], spec: Spec) -> dict[str, Any]:
    for block, value in spec.job.trainer.items():
        if block not in _BLOCKS and block not in _OWN:
            raise SpecError(
                f"{block} is not a block of a Trinity-RFT configuration",
                where=place_of(spec, block),
                expected=nearest(block, _BLOCKS) or f"expected one of {', '.join(_BLOCKS)}",
            )
        document = {**document, block: _put(document.get(block), value, block, spec)}
    return document


def _put(ours: Any, theirs: Any, path: str, spec: Spec) -> Any:
    if path in _OWN:
        if theirs == ours:
            return ours
        raise SpecError(
            f"{path} is decided by the plan",
            where=place_of(spec, path),
            expected="expected nothing" if ours is None else f"expected {ours}",
            remedy="leave it out; --pin, or the keys of the job and the cluster change it",
        )
    if isinstance(theirs, Mapping) and (ours is None or isinstance(ours, dict)):
        below = dict(ours or {})
        for key, value in theirs.items():
            below[str(key)] = _put(below.get(str(key)), value, f"{path}.{key}", spec)
        return below
    if isinstance(ours, dict):
        raise SpecError("is not a mapping", where=place_of(spec, path), expected="expected keys below it")
    return theirs


# The text ------------------------------------------------------------------------------------------------------------

_TITLES = {
    "mode": "The run",
    "algorithm": "Training",
    "model": "Model",
    "cluster": "Machines",
    "buffer": "Data",
    "trainer": "Layout and memory",
    "synchronizer": "Beside",
}
"""First key of a section -> its title."""


def _sections(document: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[Section]:
    title, entries = "", list[Entry]()
    for key, value in document.items():
        if key in _TITLES:
            if entries:
                yield Section(title=title, entries=tuple(entries))
            title, entries = _TITLES[key], []
        entries.append(_entry(key, value, key, reasons))
    yield Section(title=title, entries=tuple(entries))


def _entry(key: str, value: Any, path: str, reasons: Mapping[str, str]) -> Entry:
    comment = reasons.get(path, "")
    if isinstance(value, Mapping) and value:
        below = tuple(_entry(inner, item, f"{path}.{inner}", reasons) for inner, item in value.items())
        return Entry(key=key, entries=below, comment=comment)
    return Entry(key=key, value=value, comment=comment)


SAMPLES = "TOPOPLAN_SAMPLES"
"""Variable with the directory of generated samples, which OmegaConf substitutes in Trinity-RFT's configuration
(`common/config.py`, load_config)."""
_EPOCHS = 10_000.0
"""Epochs over the few generated samples; the reader treats all epochs as one sequence of samples."""
_SPARE_TOKENS = 64
"""Margin for a sample's length, because a sample longer than max_model_len stops the run."""


def _job(spec: Spec, steps: int, output: str) -> Job:
    """Return the trial's job, which has more epochs than needed: the trial is stopped once it has enough steps."""
    job = spec.job
    own: Mapping[str, Any] = job.trainer.get("trainer") or {}
    block = {**own, "save_interval": trials.NEVER, "save_hf_checkpoint": "never"}
    epochs = _EPOCHS if trials.is_generated(job) else job.epochs
    return replace(job, epochs=epochs, trainer={**job.trainer, "trainer": block, "checkpoint_root_dir": output})


def _samples(spec: Spec) -> dict[str, str]:
    return {f"{trials.DIRECTORY}/samples.jsonl": trials.lines(trials.records(spec, shorter_by=_SPARE_TOKENS))}


TRIAL = trials.Trial(job=_job, samples=_samples)


ROPE_THETA = "ROPE_THETA"
"""The environment variable that the node scripts set from the model's config.json."""


def rope_scaling(model: Model, seq_len: int) -> dict[str, Any] | None:
    """Return YaRN's settings for a sequence longer than the model's own context; None within it.

    transformers 5 requires rope_theta with the factor (`modeling_rope_utils.py`). It is read on the nodes, since this
    machine may not have the model's directory.
    """
    factor = yarn_factor(model, seq_len)
    if factor is None:
        return None
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained_positions(model),
        "rope_theta": f"${{oc.decode:${{oc.env:{ROPE_THETA}}}}}",
    }


def trained_positions(model: Model) -> int:
    """Return the number of positions that YaRN stretches: the model's own context.

    For Qwen3 it is 32,768, as the model cards say for YaRN: config.json adds 8,192 for a prompt.
    """
    own = model.max_position_embeddings
    return 32768 if model.model_type in ("qwen3", "qwen3_moe") and own == 40960 else own


def yarn_factor(model: Model, seq_len: int) -> float | None:
    """Return the length divided by the positions that YaRN stretches; None for a length within the model's own."""
    own = model.max_position_embeddings
    return seq_len / trained_positions(model) if own and seq_len > own else None
