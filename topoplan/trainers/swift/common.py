"""What the train.yaml of `swift sft` and of `megatron sft` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.operators.adapters import ALPHA_PER_RANK, LORA_RANK
from topoplan.reading.values import Keys, as_whole
from topoplan.specs.job import Job
from topoplan.specs.source import plain_scalar
from topoplan.specs.spec import Spec
from topoplan.trainers import train_yaml
from topoplan.trainers.codec import Reading
from topoplan.trainers.models import model_directory
from topoplan.trainers.swift.arguments import Command, oldest_version, swift_versions
from topoplan.trainers.swift.counterparts import WARMUP_KEYS
from topoplan.trainers.swift.samples import dataset_value, samples_of
from topoplan.trainers.train_yaml import WARMUP_FRACTION, head, loaders, workers
from topoplan.trainers.yaml_text import Entry, Section

READ_AT = swift_versions()[-1]
"""The version of ms-swift that bundles install."""
_FREEZES = {
    "freeze_vit": "freeze_vision_tower",
    "freeze_aligner": "freeze_multi_modal_projector",
    "freeze_llm": "freeze_language_model",
}
TASKS = ("causal_lm", "seq_cls")
"""Supported values of task_type."""
BRIDGE = "1.6.5"
"""The version of mcore-bridge that files were tested with."""


def labels_of(keys: Keys) -> int:
    """Return the outputs of the last layer of a classifier or reward model (model/register.py); 0 for other models."""
    if keys.given("rlhf_type") == "rm":
        return 1  # arguments/rlhf_args.py::_init_rm, megatron/arguments/rlhf_args.py
    return (as_whole(keys.given("num_labels")) or 1) if keys.given("task_type") == "seq_cls" else 0


def swift_head(spec: Spec, layout: Layout, command: str) -> tuple[str, ...]:
    """Return the first lines of train.yaml."""
    section: Command = "megatron sft" if command.startswith("megatron") else "swift rlhf"
    oldest = oldest_version(spec.job.trainer, section)
    versions = READ_AT if oldest == READ_AT else f"{oldest} to {READ_AT}"
    return head(spec, layout, f"`{command}` of ms-swift {versions}")


def model_entries(spec: Spec) -> list[Entry]:
    """Return entries for the model's location."""
    return [
        Entry("model", model_directory(spec.model), "a directory on every node"),
        Entry("check_model", False, "otherwise ModelScope is asked for a newer version"),
    ]


def of_images(reading: Reading) -> dict[str, Any]:
    """Return a job's keys on a vision-language model's frozen parts and images."""
    if reading.model.vision is None:
        return {}
    found: dict[str, Any] = {part: reading.keys.flag(key) for key, part in _FREEZES.items()}
    # qwen_vl_utils reads the variable if the template has no number.
    variable = reading.launch.variable("MAX_PIXELS") if reading.launch else None
    pixels = reading.keys.count("max_pixels") or (as_whole(plain_scalar(variable.value)) if variable else None)
    return found | ({"image_max_pixels": pixels} if pixels else {})


def freeze_entries(spec: Spec) -> list[Entry]:
    """Return entries for the frozen parts of a vision-language model; with LoRA, these get no adapters."""
    job = spec.job
    if spec.model.vision is None:
        return []
    return [
        Entry("freeze_vit", job.freeze_vision_tower),
        Entry("freeze_aligner", job.freeze_multi_modal_projector, "the projector from images to tokens"),
        Entry("freeze_llm", job.freeze_language_model),
    ]


def adapter_entries(job: Job, dropout: float) -> list[Entry]:
    """Return entries for LoRA: rank, scale, dropout and target layers; `dropout` is for jobs that do not state it."""
    rank, every = job.lora_rank or LORA_RANK, "all" in job.lora_target
    return [
        Entry("lora_rank", rank),
        Entry("lora_alpha", ALPHA_PER_RANK * rank, "twice the rank, with every trainer; ms-swift's default is 32"),
        Entry(
            "lora_dropout",
            dropout if job.lora_dropout is None else job.lora_dropout,
            "ms-swift's default is 0.05; 0 needs less memory",
        ),
        Entry(
            "target_modules",
            ["all-linear"] if every else list(job.lora_target),
            "every linear layer except the output layer" if every else "",
        ),
    ]


def warmup_entries(key: str, user: Mapping[str, Any]) -> list[Entry]:
    """Return the entry for the warm-up's share of all steps, unless the user's arguments have it as a number."""
    return [] if user.keys() & WARMUP_KEYS - {key} else [Entry(key, WARMUP_FRACTION, "of all steps")]


def data_section(spec: Spec, *, unpacked: str) -> Section:
    """Return the section on samples, their length and data workers; `unpacked` describes samples without packing."""
    job, sees = spec.job, spec.model.vision is not None
    cut = ("right", "cuts longer samples, as planned; the default drops them")
    if sees:
        cut = ("delete", "drops longer samples, because cutting keeps all image tokens")
    packs = "several samples per sequence, with attention within each sample" if job.packing else unpacked
    entries = [
        Entry(
            "dataset",
            dataset_value(job),
            "" if samples_of(job) else "a file of samples or a hub id; none in the spec",
        ),
        Entry("load_from_cache_file", True, "keeps tokenized samples for the next start"),
        Entry("max_length", job.seq_len, "seq_len of the plan"),
        Entry("truncation_strategy", *cut),
        Entry("packing", job.packing, packs),
        *([Entry("max_pixels", job.image_max_pixels, "larger images are scaled down")] if sees else ()),
        Entry("dataset_num_proc", workers(spec.cluster), "tokenization processes"),
        Entry("dataloader_num_workers", loaders(spec.cluster), "per GPU"),
    ]
    return Section(title="Data", entries=tuple(entries))


def output_section(steps: int | None, *further: Entry) -> Section:
    """Return the section on where and how often the run is saved; output_dir is put in front of it."""
    why = "otherwise each start adds a directory named after its time to output_dir"
    first = [Entry("add_version", False, why)]
    return train_yaml.output_section(steps, *further, Entry("logging_steps", 1), first=first)
