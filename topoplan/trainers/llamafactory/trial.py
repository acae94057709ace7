"""Trials with LLaMA-Factory: the job, and generated samples beside train.yaml if the user has named no dataset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import PurePosixPath

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import generated_samples, trials
from topoplan.trainers.llamafactory.dataset_entry import dataset_entry


def _job(spec: Spec, steps: int, output: str) -> Job:
    """Return the trial's job, limiting the user's own samples to what the trial can use."""
    job = trials.trial_job(spec.job, steps, output)
    if generated_samples.is_generated(job):
        return job
    most = job.trainer.get("max_samples")
    needed = generated_samples.how_many(spec)
    return replace(job, trainer={**job.trainer, "max_samples": min(most, needed) if isinstance(most, int) else needed})


def _samples(spec: Spec) -> dict[str, str]:
    """Return dataset_info.json and the file that it names."""
    entry: dict[str, object] = json.loads(dataset_entry(spec.job, spec.model)[0])[generated_samples.GENERATED]
    columns = entry["columns"]
    if isinstance(columns, dict):
        columns.pop("images", None)
    # data/loader.py: with a num_samples above the number of samples, samples are repeated.
    entry |= {"file_name": "samples.jsonl", "num_samples": generated_samples.how_many(spec)}
    files = {
        "dataset_info.json": json.dumps({generated_samples.GENERATED: entry}, indent=2) + "\n",
        "samples.jsonl": generated_samples.lines(generated_samples.records(spec)),
    }
    return {str(PurePosixPath(generated_samples.DIRECTORY, name)): text for name, text in files.items()}


TRIAL = trials.Trial(job=_job, samples=_samples)
