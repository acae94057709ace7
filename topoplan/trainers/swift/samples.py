"""Datasets as ms-swift names them: sample files, directories or hub ids, each with an optional `#N` for N samples.

Also trials, with generated samples beside train.yaml if the user has named no dataset.

Source: `swift/dataset/dataset_syntax.py`, DatasetSyntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import trials
from topoplan.trainers.trainer import DATASET_TO_FILL_IN

_SUFFIXES = frozenset([".json", ".jsonl", ".csv", ".parquet", ".txt"])
_COUNT = re.compile(r"#\d+\Z")


def samples_of(job: Job) -> tuple[str, ...]:
    """Return the job's datasets, with dataset_dir in front of file names."""
    names = [name.strip() for name in (job.dataset or "").split(",") if name.strip()]
    directory = job.dataset_dir
    return tuple(str(PurePosixPath(directory, name)) if directory and is_file(name) else name for name in names)


def dataset_value(job: Job) -> str | list[str]:
    """Return the value of `dataset` in train.yaml."""
    names = list(samples_of(job)) or [DATASET_TO_FILL_IN]
    return names[0] if len(names) == 1 else names


def files_in(value: Any) -> tuple[str, ...]:
    """Return the files and directories among the datasets of train.yaml, which every node needs."""
    names: Iterable[Any] = value if isinstance(value, list) else [value]
    return tuple(_COUNT.sub("", name) for name in names if isinstance(name, str) and is_file(name))


def limited(job: Job, count: int) -> str | None:
    """Return the job's datasets limited to `count` samples each, as a job's `dataset`; None if it names none."""
    names = [name.strip() for name in (job.dataset or "").split(",") if name.strip()]
    return ",".join(name if _COUNT.search(name) else f"{name}#{count}" for name in names) or None


def is_file(name: str) -> bool:
    """Whether a dataset is named by its path."""
    bare = _COUNT.sub("", name)
    return bare.startswith(("/", "./", "../")) or PurePosixPath(bare).suffix.lower() in _SUFFIXES


def is_hub_name(name: str) -> bool:
    """Whether a dataset is named by its hub id."""
    return "/" in name


_FILE = f"{trials.DIRECTORY}/samples.jsonl"


def _job(spec: Spec, steps: int, output: str, *, length: str) -> Job:
    """Return the trial's job, limiting the user's own samples to what the trial can use."""
    job = trials.trial_job(spec.job, steps, output, length=length)
    return job if trials.is_generated(job) else replace(job, dataset=limited(job, trials.how_many(spec)))


def _samples(spec: Spec) -> dict[str, str]:
    found = trials.records(spec)
    if spec.job.stage == "pt":
        found = [{"messages": [{"role": "assistant", "content": one["text"]}]} for one in found]
    return {_FILE: trials.lines(found)}


TRIAL = trials.Trial(job=partial(_job, length="max_steps"), samples=_samples)
MEGATRON_TRIAL = trials.Trial(job=partial(_job, length="train_iters"), samples=_samples)


def samples_argument(spec: Spec) -> str:
    """Return the value of `--dataset` relative to the bundle; empty if train.yaml has it. `#N` repeats samples."""
    return f"{_FILE}#{trials.how_many(spec)}" if trials.is_generated(spec.job) else ""
