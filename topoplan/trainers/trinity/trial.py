"""A trial with Trinity-RFT: its job, and the samples beside train.yaml where nobody names any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import made_up
from topoplan.trainers.trials import NEVER, Trial

SAMPLES = "TOPOPLAN_SAMPLES"
"""Variable with the directory of made-up samples, which OmegaConf puts into the configuration that Trinity-RFT reads
with it (`common/config.py`, load_config)."""
_EPOCHS = 10_000.0
"""Of the few samples that are made up: the reader goes through all epochs as one run of samples."""
_SPARE_TOKENS = 64
"""A sample that is longer than max_model_len stops the run."""


def _job(spec: Spec, steps: int, output: str) -> Job:
    """Steps go by samples and epochs: it is ended when it has taken enough."""
    job = spec.job
    own: Mapping[str, Any] = job.trainer.get("trainer") or {}
    block = {**own, "save_interval": NEVER, "save_hf_checkpoint": "never"}
    epochs = _EPOCHS if made_up.is_made_up(job) else job.epochs
    return replace(job, epochs=epochs, trainer={**job.trainer, "trainer": block, "checkpoint_root_dir": output})


def samples_path(job: Job) -> str:
    """Where train.yaml says that made-up samples are; empty for data of the user's."""
    return f"${{oc.env:{SAMPLES}}}" if made_up.is_made_up(job) else ""


def _samples(spec: Spec) -> dict[str, str]:
    return {f"{made_up.DIRECTORY}/samples.jsonl": made_up.lines(made_up.records(spec, shorter_by=_SPARE_TOKENS))}


TRIAL = Trial(job=_job, samples=_samples)
