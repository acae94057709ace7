"""Trials with Trinity-RFT: the job, and generated samples beside train.yaml if the user has named no dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import generated_samples
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
    epochs = _EPOCHS if generated_samples.is_generated(job) else job.epochs
    return replace(job, epochs=epochs, trainer={**job.trainer, "trainer": block, "checkpoint_root_dir": output})


def samples_path(job: Job) -> str:
    """Return the path of generated samples in train.yaml; empty for the user's own data."""
    return f"${{oc.env:{SAMPLES}}}" if generated_samples.is_generated(job) else ""


def _samples(spec: Spec) -> dict[str, str]:
    return {
        f"{generated_samples.DIRECTORY}/samples.jsonl": generated_samples.lines(
            generated_samples.records(spec, shorter_by=_SPARE_TOKENS)
        )
    }


TRIAL = Trial(job=_job, samples=_samples)
