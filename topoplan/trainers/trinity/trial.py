"""Trials with Trinity-RFT: the job, and generated samples beside train.yaml if the user has named no dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import made_up
from topoplan.trainers.trials import NEVER, Trial

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
    block = {**own, "save_interval": NEVER, "save_hf_checkpoint": "never"}
    epochs = _EPOCHS if made_up.is_made_up(job) else job.epochs
    return replace(job, epochs=epochs, trainer={**job.trainer, "trainer": block, "checkpoint_root_dir": output})


def samples_path(job: Job) -> str:
    """Return the path of generated samples in train.yaml; empty for the user's own data."""
    return f"${{oc.env:{SAMPLES}}}" if made_up.is_made_up(job) else ""


def _samples(spec: Spec) -> dict[str, str]:
    return {f"{made_up.DIRECTORY}/samples.jsonl": made_up.lines(made_up.records(spec, shorter_by=_SPARE_TOKENS))}


TRIAL = Trial(job=_job, samples=_samples)
