"""Optimizer steps as the trainers count them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from topoplan.specs.job import Job


def training_steps(job: Job, max_steps: int | None = None) -> int | None:
    """Optimizer steps of the job; None when the spec does not say how many samples there are.

    The last batch of an epoch is a step too, however few samples it has (transformers trainer.py,
    set_initial_training_values: `len_dataloader // steps + int(len_dataloader % steps > 0)`).
    """
    return _steps(job, max_steps, job.samples and math.ceil(job.samples / job.global_batch_size))


def megatron_steps(job: Job, max_steps: int | None = None) -> int | None:
    """The same of Megatron's trainers, which drop the last incomplete batch of each epoch.

    mcore_adapter trainer.py, _prepare_train_loop.
    """
    return _steps(job, max_steps, job.samples and job.samples // job.global_batch_size)


def _steps(job: Job, max_steps: int | None, batches: int | None) -> int | None:
    """Steps of the job with so many batches an epoch."""
    if max_steps is not None and max_steps > 0:
        return max_steps
    return None if batches is None else math.ceil(max(1, batches) * job.epochs)


def step_limit(keys: Mapping[str, Any], name: str) -> int | None:
    """Steps that a key of the trainer asks for; None where it asks for none."""
    limit = keys.get(name)
    return limit if isinstance(limit, int) and limit > 0 else None


def steps(job: Job, keys: Mapping[str, Any]) -> int | None:
    """Those of transformers, with the keys that it reads."""
    return training_steps(job, step_limit(keys, "max_steps"))
