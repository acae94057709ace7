"""A trial with LLaMA-Factory: its job, and the samples beside train.yaml where nobody names any."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import PurePosixPath

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import made_up, trials
from topoplan.trainers.llamafactory.dataset_entry import dataset_entry


def _job(spec: Spec, steps: int, output: str) -> Job:
    """Of the user's own samples no more are tokenised than it can need."""
    job = trials.trial_job(spec.job, steps, output)
    if made_up.is_made_up(job):
        return job
    most = job.trainer.get("max_samples")
    needed = made_up.how_many(spec)
    return replace(job, trainer={**job.trainer, "max_samples": min(most, needed) if isinstance(most, int) else needed})


def _samples(spec: Spec) -> dict[str, str]:
    """dataset_info.json and the file that it names."""
    entry: dict[str, object] = json.loads(dataset_entry(spec.job, spec.model)[0])[made_up.MADE_UP]
    columns = entry["columns"]
    if isinstance(columns, dict):
        columns.pop("images", None)
    # data/loader.py: a num_samples above what is there takes samples again.
    entry |= {"file_name": "samples.jsonl", "num_samples": made_up.how_many(spec)}
    files = {
        "dataset_info.json": json.dumps({made_up.MADE_UP: entry}, indent=2) + "\n",
        "samples.jsonl": made_up.lines(made_up.records(spec)),
    }
    return {str(PurePosixPath(made_up.DIRECTORY, name)): text for name, text in files.items()}


TRIAL = trials.Trial(job=_job, samples=_samples)
