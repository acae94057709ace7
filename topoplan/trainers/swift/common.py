"""What train.yaml has for `swift sft` and for `megatron sft` alike."""

from __future__ import annotations

from topoplan.operators.adapters import LORA_RANK
from topoplan.planner.plan import Plan
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.mca_facts import model_directory
from topoplan.trainers.swift.arguments import Command, oldest_version, swift_versions
from topoplan.trainers.swift.samples import dataset_value, samples_of
from topoplan.trainers.train_yaml import OUTPUT_TITLE
from topoplan.trainers.usual import loaders, save_steps, workers
from topoplan.trainers.yaml_text import Entry, Section

READ_AT = swift_versions()[-1]
"""The ms-swift that is installed."""
BRIDGE = "1.6.5"
"""The mcore-bridge beside which it was tried."""


def head(spec: Spec, plan: Plan, command: str) -> tuple[str, ...]:
    """The first lines of train.yaml."""
    return (
        f"{spec.model.name} on {spec.cluster.name}: plan {plan.id}",
        f"For `{command}` of ms-swift {_versions(spec, command)}.",
        "Relative paths start at the directory in which the node scripts start the trainer.",
    )


def _versions(spec: Spec, command: str) -> str:
    section: Command = "megatron sft" if command.startswith("megatron") else "swift rlhf"
    oldest, newest = oldest_version(spec.job.trainer, section), READ_AT
    return newest if oldest == newest else f"{oldest} to {newest}"


def model_entries(spec: Spec) -> list[Entry]:
    """Where the model lies."""
    return [
        Entry(key="model", value=model_directory(spec.model), comment="a directory on every node"),
        Entry(key="check_model", value=False, comment="else ModelScope is asked whether there is a newer one"),
    ]


def freeze_entries(spec: Spec) -> list[Entry]:
    """The parts of a vision-language model that are not trained; with LoRA, that get no adapters."""
    job = spec.job
    if spec.model.vision is None:
        return []
    return [
        Entry(key="freeze_vit", value=job.freeze_vision_tower),
        Entry(key="freeze_aligner", value=job.freeze_multi_modal_projector, comment="what projects images to tokens"),
        Entry(key="freeze_llm", value=job.freeze_language_model),
    ]


def adapter_entries(job: Job) -> list[Entry]:
    """LoRA: its rank, its scale and the layers that have it."""
    rank = job.lora_rank or LORA_RANK
    every = "all" in job.lora_target
    return [
        Entry(key="lora_rank", value=rank),
        Entry(key="lora_alpha", value=4 * rank, comment="four times the rank, as ms-swift has it by default"),
        Entry(
            key="target_modules",
            value=["all-linear"] if every else list(job.lora_target),
            comment="every linear layer but the output layer" if every else "",
        ),
    ]


def data_section(spec: Spec, *, unpacked: str) -> Section:
    """Samples, their length, and the processes that read them; `unpacked` says what becomes of them without packing."""
    job = spec.job
    comment = "" if samples_of(job) else "a file of samples or a hub id; the spec has none"
    entries = [Entry(key="dataset", value=dataset_value(job), comment=comment)]
    entries.append(
        Entry(key="load_from_cache_file", value=True, comment="tokenised samples are kept for the next start")
    )
    entries.append(Entry(key="max_length", value=job.seq_len, comment="the seq_len that was planned for"))
    if spec.model.vision is None:
        entries.append(
            Entry(key="truncation_strategy", value="right", comment="cut, as planned; the default drops longer samples")
        )
    else:
        entries.append(
            Entry(key="truncation_strategy", value="delete", comment="a cut would keep all of a sample's image tokens")
        )
    packs = "samples share sequences, and attend to their own alone" if job.packing else unpacked
    entries.append(Entry(key="packing", value=job.packing, comment=packs))
    if spec.model.vision is not None:
        entries.append(Entry(key="max_pixels", value=job.image_max_pixels, comment="larger images are scaled down"))
    entries += [
        Entry(key="dataset_num_proc", value=workers(spec.cluster), comment="processes that tokenise"),
        Entry(key="dataloader_num_workers", value=loaders(spec.cluster), comment="a GPU"),
    ]
    return Section(title="Data", entries=tuple(entries))


def output_section(steps: int | None, *further: Entry) -> Section:
    """Where and how often the run is saved; output_dir is put in front of it."""
    entries = (
        Entry(
            key="add_version", value=False, comment="else output_dir gets a directory named by the time of each start"
        ),
        Entry(key="save_strategy", value="steps"),
        Entry(key="save_steps", value=save_steps(steps)),
        Entry(key="save_total_limit", value=2, comment="older ones of this run are removed"),
        *further,
        Entry(key="logging_steps", value=1),
    )
    return Section(title=OUTPUT_TITLE, entries=entries)
