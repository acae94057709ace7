"""Optimizer steps as the trainers count them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from topoplan.specs.job import Job


def training_steps(job: Job, max_steps: int | None = None) -> int | None:
    """Return the optimizer steps of a job; None if the spec does not give the number of samples.

    An incomplete last batch of an epoch counts as a step (transformers trainer.py, set_initial_training_values:
    `len_dataloader // steps + int(len_dataloader % steps > 0)`).
    """
    return _steps(job, max_steps, job.samples and math.ceil(job.samples / job.global_batch_size))


def megatron_steps(job: Job, max_steps: int | None = None) -> int | None:
    """Return the optimizer steps with Megatron trainers, which drop an incomplete last batch of each epoch.

    Source: mcore_adapter trainer.py, _prepare_train_loop.
    """
    return _steps(job, max_steps, job.samples and job.samples // job.global_batch_size)


def _steps(job: Job, max_steps: int | None, batches: int | None) -> int | None:
    """Return the steps of a job with `batches` per epoch."""
    if max_steps is not None and max_steps > 0:
        return max_steps
    return None if batches is None else math.ceil(max(1, batches) * job.epochs)


def step_limit(keys: Mapping[str, Any], name: str) -> int | None:
    """Return the number of steps that a trainer's key sets; None if it sets none."""
    limit = keys.get(name)
    return limit if isinstance(limit, int) and limit > 0 else None


def steps(job: Job, keys: Mapping[str, Any]) -> int | None:
    """Return the optimizer steps as transformers counts them from its keys."""
    return training_steps(job, step_limit(keys, "max_steps"))
