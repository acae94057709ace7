"""Optimizer steps as the trainer of transformers counts them."""

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
    if max_steps is not None and max_steps > 0:
        return max_steps
    if job.samples is None:
        return None
    return math.ceil(max(1, math.ceil(job.samples / job.global_batch_size)) * job.epochs)


def step_limit(keys: Mapping[str, Any], name: str) -> int | None:
    """Steps that a key of the trainer asks for; None where it asks for none."""
    limit = keys.get(name)
    return limit if isinstance(limit, int) and limit > 0 else None


def steps(job: Job, keys: Mapping[str, Any]) -> int | None:
    """The same, with keys that transformers reads."""
    return training_steps(job, step_limit(keys, "max_steps"))
