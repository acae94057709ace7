"""Sections of train.yaml that LLaMA-Factory's engines share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import default_template, trainer_versions
from topoplan.trainers.models import model_directory
from topoplan.trainers.train_yaml import DDP_TIMEOUT, loaders, save_steps, workers
from topoplan.trainers.trainer import DATASET_TO_FILL_IN
from topoplan.trainers.yaml_text import Entry, Section

PADDED = "padded to the longest sample of the batch"
"""How unpacked samples are padded."""


def versions_line() -> str:
    """Return the versions of transformers that the file is for."""
    return "transformers " + " to ".join(trainer_versions()["transformers"])


def model_section(spec: Spec, freezable: Collection[str], where: str, *method: Entry) -> Section:
    """Return the section; `where` comments on the model's directory, `freezable` are the freezable model types."""
    job, model = spec.job, spec.model
    entries = [
        Entry("model_name_or_path", model_directory(model), where),
        Entry("stage", job.stage),
        Entry("do_train", True),
        *method,
    ]
    if model.vision is not None and model.model_type in freezable:
        keys = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
        entries += [Entry(key, getattr(job, key)) for key in keys]
    return Section(title="Model and method", entries=tuple(entries))


def training_section(spec: Spec, warmup: int, why: str, *further: Entry) -> Section:
    """Return the section; `why` is the reason for the number of warm-up steps."""
    entries = (
        Entry("num_train_epochs", float(spec.job.epochs)),
        Entry("learning_rate", float(spec.job.learning_rate)),
        Entry("lr_scheduler_type", "cosine"),
        Entry("warmup_steps", warmup, f"{why}; an integer works with transformers 4 and 5"),
        *further,
        DDP_TIMEOUT,
    )
    return Section(title="Training", entries=entries)


def evaluation_entries(user: Mapping[str, Any], steps: int | None) -> list[Entry]:
    """Return how often a run evaluates, if the user's keys enable evaluation without saying when."""
    if user.get("eval_strategy") != "steps":
        return []
    return [Entry("eval_steps", save_steps(steps), "the default, logging_steps, would evaluate after every step")]


def data_section(spec: Spec, order: str, *, padded: str = PADDED) -> Section:
    """Return the section; `order` says how samples are read, `padded` how unpacked ones are padded."""
    job, model = spec.job, spec.model
    notes: list[str] = []
    comment = "a name in dataset_info.json; none in the spec" if job.dataset is None else order
    entries = [
        Entry("dataset", DATASET_TO_FILL_IN if job.dataset is None else job.dataset, comment),
        Entry("dataset_dir", job.dataset_dir or "data", "directory of dataset_info.json"),
    ]
    template = job.template or default_template(model.name, model.model_type)
    if template is not None:
        entries.append(Entry("template", template, "" if job.template else "LLaMA-Factory's template for this model"))
    else:
        notes.append("template: not in the spec and not known for this model; the tokenizer's chat template is used")
    entries.append(Entry("cutoff_len", job.seq_len, "seq_len of the plan"))
    if job.stage == "pt" and job.packing:
        # DataArguments.__post_init__ subtracts one from cutoff_len for an explicit `packing: true`. Stage pt's default
        # is applied later, and run_pt adds the token that the shift of the labels uses up.
        notes.append("packing: on by default in stage pt; if set explicitly, each sequence would lose a token")
    elif job.stage == "pt":
        entries.append(Entry("packing", False, "stage pt packs by default"))
    elif job.stage == "sft":
        entries.append(
            Entry(
                "packing", job.packing, "several samples per sequence; longer ones are cut" if job.packing else padded
            )
        )
    if model.vision is not None:
        entries.append(Entry("image_max_pixels", job.image_max_pixels, "larger images are scaled down"))
    entries += [
        Entry("preprocessing_num_workers", workers(spec.cluster), "tokenization processes, on each node"),
        Entry("dataloader_num_workers", loaders(spec.cluster), "per GPU"),
    ]
    return Section(title="Data", entries=tuple(entries), notes=tuple(notes))
