"""What LLaMA-Factory's paths have in common: start, run, keys that go along, data sets, trials, and train.yaml."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from topoplan.catalog.packages import releases
from topoplan.reading.values import Keys, value_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.passed_on import TRAINER_KEYS_OF_JOB, TRAINER_KEYS_OF_LAYOUT
from topoplan.specs.spec import Spec
from topoplan.trainers import trials
from topoplan.trainers.codec import common
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.llamafactory.key_list import (
    TrainerPath,
    default_template,
    judge_key,
    missing_template,
    trainer_versions,
)
from topoplan.trainers.models import model_directory
from topoplan.trainers.requirements import Versions
from topoplan.trainers.steps import pauses_of
from topoplan.trainers.train_yaml import DDP_TIMEOUT, loaders, save_steps, slow_precision, workers
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, Checkpoints, TrainerRun
from topoplan.trainers.traits import SHARDED
from topoplan.trainers.yaml_text import Entry, Section

_LAUNCHER = '-m llamafactory.launcher "$bundle_dir/train.yaml" ${resume[@]+"${resume[@]}"}'
"""The command of each process: launcher.py as a module calls `run_exp`; `read_args` takes argv[1] as the YAML file and
the following words as overrides of its keys."""


def launcher(job: Job, further: str = "") -> str:
    """Return the command of each process, with overrides for keys whose values are files of the bundle."""
    words = [
        _LAUNCHER,
        further,
        beside("dataset_dir", trials.DIRECTORY) if trials.is_generated(job) else "",
    ]
    return " ".join(filter(None, words))


def beside(key: str, file: str) -> str:
    """Return an override for `launcher`: a key with the absolute path of a file in the bundle, quoted as YAML."""
    quote = "\\'"
    return f"\"{key}='${{bundle_dir//{quote}/{quote}{quote}}}/{file}'\""


RESUME_FROM = """\
resume=()
[[ -z "$last_checkpoint" ]] || resume=("resume_from_checkpoint='${last_checkpoint//\\'/\\'\\'}'")
"""
"""Bash code that must precede `launcher`."""

START = (
    """\
# torchrun starts the launcher module directly: `llamafactory-cli train` would start another torchrun in each process.
# exec, so that signals reach torchrun, which stops its workers.
"""
    + RESUME_FROM
)

RESUME = """\
start it again in the same way. The script passes the last complete checkpoint in `output_dir` to the
  trainer, which skips the samples that it has already seen."""

CHECKPOINTS = Checkpoints(takes_any=True)
"""transformers/trainer.py, _save_checkpoint writes trainer_state.json last, on the first rank, after all others have
written their parts; hparams/parser.py uses get_last_checkpoint, which picks the one with the highest number."""

CACHING_ALLOCATOR = EnvVar(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "reduces fragmentation; llamafactory-cli sets it too"
)
RECORD_VRAM = EnvVar("RECORD_VRAM", "1", "adds memory to trainer_log.jsonl, for `topoplan calibrate`")

VERSIONS = Versions(
    title="LLaMA-Factory",
    bounds={
        "mcore_adapter": (">=0.10.dev0", "0.0.1 on PyPI is an unrelated project of the same name"),
        # mcore_adapter 8eb27cc pyproject.toml: megatron-core>=0.15.0,<0.19.0
        "megatron-core": (">=0.15,<0.19", "mcore_adapter supports megatron-core 0.15 to 0.18"),
    },
    tried=lambda: {"megatron-core": (releases()[0].megatron_core, "0.18.2")},
)


def run_of(spec: Spec, values: Mapping[str, Any], steps: int | None, **further: Any) -> TrainerRun:
    """Return what a run of so many steps needs on a node, read from train.yaml; `further` are the path's own fields."""
    return TrainerRun(
        model_dir=str(values["model_name_or_path"]),
        output_dir=str(values["output_dir"]),
        dataset=str(values["dataset"]),
        dataset_dir=_dataset_directory(values),
        to_fill_in="dataset",
        steps=steps,
        pauses=pauses_of(values, spec.job, steps),
        **{"checkpoints": CHECKPOINTS, **further},
    )


def _dataset_directory(values: Mapping[str, Any]) -> str | None:
    """Return the directory of dataset_info.json; None for data from a hub, tokenized earlier, or in the bundle."""
    directory = str(values["dataset_dir"])
    if values["dataset"] == trials.GENERATED:
        return None
    if directory == "ONLINE" or directory.startswith("REMOTE:") or values.get("tokenized_path"):
        return None
    return directory


def usual_warnings(spec: Spec) -> Iterator[str]:
    """Warn about valid settings that may surprise the user, with any engine."""
    job = spec.job
    if job.dataset is not None and any(name.strip().endswith((".json", ".jsonl")) for name in job.dataset.split(",")):
        yield (
            f"the trainer does not accept files as data sets: add {job.dataset} to dataset_info.json, as the bundle's"
            " README.md shows"
        )
    if job.template is not None and (missing := missing_template(job.template)):
        yield missing
    yield from slow_precision(spec)


# Keys of a user's file that go along with its job ---------------------------------------------------------------------

DECIDED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "disable_gradient_checkpointing", "pure_bf16"),
    *("quantization_bit", "quantization_method", "double_quantization", "enable_liger_kernel"),
    # Keys that change memory or time in ways that no plan covers stay off, which is their default.
    *("additional_target", "auto_find_batch_size", "freeze_extra_modules", "freeze_trainable_modules", "fp8"),
    *("gradient_checkpointing", "mixture_of_depths", "parallelism_config", "shift_attn", "upcast_lmhead_output"),
    *("use_adam_mini", "use_apollo", "use_badam", "use_dora", "use_galore", "use_kt", "use_llama_pro", "use_muon"),
    *("use_unsloth", "use_unsloth_gc", "fsdp_config"),
)
"""Keys that every plan without Megatron decides."""

_OF_THE_RUN = frozenset(
    [
        *("model_name_or_path", "do_train", "output_dir", "resume_from_checkpoint"),
        *("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "optim", "flash_attn"),
        *("neat_packing", "sequence_packing"),
    ]
)
"""Keys of a single run, which every plan sets itself, or which are read elsewhere."""


WARMUP_RATIO = "warmup_ratio"
_UNSTATED = {"lr_scheduler_type": "linear", "warmup_steps": 0}
"""Defaults of transformers (`training_args.py`) for keys that bundles write with another value."""


def carried(keys: Keys, job: Job, backend: str | None = None) -> Mapping[str, Any]:
    """Return the keys of the job that no prediction reads.

    Under `trainer` are keys that LLaMA-Factory reads on the path of a backend, or, for None, on every path that may
    train the job, also with the value of its defaults: bundles have defaults of their own.
    """
    paths = ("mca", "plain") if job.finetuning == "full" else ("plain",)
    if backend is not None:
        paths = ("plain",) if backend in SHARDED else ("mca",)
    version = trainer_versions()["llamafactory"]
    not_these = {*_OF_THE_RUN, *DECIDED, *TRAINER_KEYS_OF_JOB, *TRAINER_KEYS_OF_LAYOUT}
    trainer = dict(job.trainer)
    for key in keys.configuration.source.data:
        if key not in not_these:
            written = value_of(keys.configuration, key)
            verdicts = [judge_key(key, written, path=path, version=version) for path in paths]
            if not any(verdict.trouble for verdict in verdicts):
                trainer[key] = verdicts[0].value
    trainer = {**_UNSTATED, **trainer}
    if WARMUP_RATIO in trainer:  # transformers 4 ignores it beside a number of steps, and 5 may have null
        del trainer[WARMUP_RATIO if trainer["warmup_steps"] or trainer[WARMUP_RATIO] is None else "warmup_steps"]
    named = {key: keys.text(key) for key in ("dataset_dir", "template") if keys.given(key) is not None}
    return {**common(keys, job), **named, **({"trainer": trainer} if trainer else {})}


def takes(name: str, value: Any, *, path: TrainerPath) -> bool:
    """Whether LLaMA-Factory takes a key with a value on a path."""
    return not judge_key(name, value, path=path, version=trainer_versions()["llamafactory"]).trouble


# Data sets and trials -------------------------------------------------------------------------------------------------

_CHAT_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_USUAL_COLUMNS = {
    "pt": {"prompt": "text"},
    "sft": {"messages": "messages", "content_tag": "content"},
    "dpo": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
}
"""Stage -> the columns of a file that is not on this machine."""
_UNREAD_COLUMNS = {"pt": ("query", "response", "history", "chosen", "rejected"), "sft": ("chosen", "rejected")}
"""Stage -> the columns that it leaves alone. In stage dpo, `response` is another answer, which it does not read."""


def dataset_entry(job: Job, model: Model) -> tuple[str, str]:
    """Return an entry of dataset_info.json for the job's (first) dataset and a record of its file, as JSON text.

    A .json file is a list of records; each line of a .jsonl file is one. The columns are those of the file if it was
    read. Source: LLaMA-Factory data/parser.py (DatasetAttr) and data/converter.py.
    """
    name = (job.dataset or "").split(",")[0].strip() or DATASET_TO_FILL_IN
    if name == DATASET_TO_FILL_IN:
        name = "my_data"
    read = job.lengths.columns if job.lengths and not trials.is_generated(job) else ()
    unread = _UNREAD_COLUMNS.get(job.stage, ("response",))
    columns = {role: column for role, column in read if role not in unread} or dict(_USUAL_COLUMNS[job.stage])
    if model.vision is not None and job.stage == "sft":
        columns["images"] = "images"
    talks, content = "messages" in columns, columns.pop("content_tag", "value")
    file = job.lengths.source.split(", ")[0] if job.lengths and read else f"{name}.json"
    entry: dict[str, Any] = {"file_name": name if name.endswith((".json", ".jsonl")) else file}
    entry |= {"ranking": True} if job.stage == "dpo" else {}
    entry |= {"formatting": "sharegpt"} if talks else {}
    entry["columns"] = columns
    entry |= {"tags": {**_CHAT_TAGS, "system_tag": "system"}} if talks and content == "content" else {}
    values = _record(job, model, talks=talks, in_roles=content == "content")
    record = {column: values[role] for role, column in columns.items()}
    lines = ",\n".join(f"    {_json(key)}: {_json(value)}" for key, value in entry.items())
    shown = record if entry["file_name"].endswith(".jsonl") else [record]
    return f"{{\n  {_json(name)}: {{\n{lines}\n  }}\n}}", _json(shown)


def _record(job: Job, model: Model, *, talks: bool, in_roles: bool) -> dict[str, Any]:
    """Return a value for each role of a column; `in_roles`: messages have roles and content, as in OpenAI's format."""

    def said(user: bool, text: str) -> Any:
        if not talks:
            return text
        if in_roles:
            return {"role": "user" if user else "assistant", "content": text}
        return {"from": "human" if user else "gpt", "value": text}

    question = "<image>A question?" if model.vision is not None and job.stage == "sft" else "A question?"
    asked, answered = said(True, question), said(False, "The answer.")
    return {
        "prompt": "A whole document." if job.stage == "pt" else question,
        "query": "Its input, if any.",
        "response": "The answer.",
        "history": [["An earlier question?", "Its answer."]],
        "system": "An instruction.",
        "tools": "[]",
        "messages": [asked] if job.stage == "dpo" else [asked, answered],
        "chosen": said(False, "The better answer."),
        "rejected": said(False, "The worse answer."),
        "images": ["path/to/image.png"],
    }


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _job(spec: Spec, steps: int, output: str) -> Job:
    """Return the trial's job, limiting the user's own samples to what the trial can use."""
    job = trials.trial_job(spec.job, steps, output)
    if trials.is_generated(job):
        return job
    most = job.trainer.get("max_samples")
    needed = trials.how_many(spec)
    return replace(job, trainer={**job.trainer, "max_samples": min(most, needed) if isinstance(most, int) else needed})


def _samples(spec: Spec) -> dict[str, str]:
    entry: dict[str, object] = json.loads(dataset_entry(spec.job, spec.model)[0])[trials.GENERATED]
    columns = entry["columns"]
    if isinstance(columns, dict):
        columns.pop("images", None)
    # data/loader.py: with a num_samples above the number of samples, samples are repeated.
    entry |= {"file_name": "samples.jsonl", "num_samples": trials.how_many(spec)}
    files = {
        "dataset_info.json": json.dumps({trials.GENERATED: entry}, indent=2) + "\n",
        "samples.jsonl": trials.lines(trials.records(spec)),
    }
    return {str(PurePosixPath(trials.DIRECTORY, name)): text for name, text in files.items()}


TRIAL = trials.Trial(job=_job, samples=_samples)


# Sections of train.yaml -----------------------------------------------------------------------------------------------

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


def training_section(spec: Spec, user: Mapping[str, Any], warmup: int, why: str, *further: Entry) -> Section:
    """Return the section; `why` is the reason for the number of warm-up steps, unless the user's keys have a ratio."""
    by_steps = Entry("warmup_steps", warmup, f"{why}; an integer works with transformers 4 and 5")
    entries = (
        Entry("num_train_epochs", float(spec.job.epochs)),
        Entry("learning_rate", float(spec.job.learning_rate)),
        Entry("lr_scheduler_type", "cosine"),
        Entry(WARMUP_RATIO, user[WARMUP_RATIO]) if WARMUP_RATIO in user else by_steps,
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
