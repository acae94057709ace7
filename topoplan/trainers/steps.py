"""Optimizer steps as the trainer of transformers counts them."""

from __future__ import annotations

import math

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
