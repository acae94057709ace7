"""Trials with ms-swift: the job, and generated samples beside train.yaml if the user has named no dataset."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import generated_samples, trials
from topoplan.trainers.swift.samples import limited

_FILE = f"{generated_samples.DIRECTORY}/samples.jsonl"


def _job(spec: Spec, steps: int, output: str, *, length: str) -> Job:
    """Return the trial's job, limiting the user's own samples to what the trial can use."""
    job = trials.trial_job(spec.job, steps, output, length=length)
    return (
        job
        if generated_samples.is_generated(job)
        else replace(job, dataset=limited(job, generated_samples.how_many(spec)))
    )


def _samples(spec: Spec) -> dict[str, str]:
    found = generated_samples.records(spec)
    if spec.job.stage == "pt":
        found = [{"messages": [{"role": "assistant", "content": one["text"]}]} for one in found]
    return {_FILE: generated_samples.lines(found)}


TRIAL = trials.Trial(job=partial(_job, length="max_steps"), samples=_samples)
MEGATRON_TRIAL = trials.Trial(job=partial(_job, length="train_iters"), samples=_samples)


def samples_argument(spec: Spec) -> str:
    """Return the value of `--dataset` relative to the bundle; empty if train.yaml has it. `#N` repeats samples."""
    return f"{_FILE}#{generated_samples.how_many(spec)}" if generated_samples.is_generated(spec.job) else ""
