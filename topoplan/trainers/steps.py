"""Optimizer steps as the trainers count them, and how often a run interrupts training to save or evaluate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from topoplan.specs.job import Job


def training_steps(job: Job, max_steps: int | None = None, *, drops_last: bool = False) -> int | None:
    """Return the optimizer steps of a job; None if the spec does not give the number of samples.

    An incomplete last batch of an epoch counts as a step (transformers trainer.py, set_initial_training_values:
    `len_dataloader // steps + int(len_dataloader % steps > 0)`) unless the trainer `drops_last`.
    """
    if max_steps is not None and max_steps > 0:
        return max_steps
    if job.samples is None:
        return None
    batches = job.samples // job.global_batch_size if drops_last else math.ceil(job.samples / job.global_batch_size)
    return math.ceil(max(1, batches) * job.epochs)


megatron_steps = partial(training_steps, drops_last=True)
"""Optimizer steps with Megatron trainers, which drop an incomplete last batch of each epoch.

Source: mcore_adapter trainer.py, _prepare_train_loop.
"""


def steps(job: Job, keys: Mapping[str, Any], *, key: str = "max_steps", drops_last: bool = False) -> int | None:
    """Return the optimizer steps of a job with a trainer's keys, of which `key` may set them."""
    limit = keys.get(key)
    return training_steps(job, limit if isinstance(limit, int) else None, drops_last=drops_last)


_USUAL_EVERY = 500
"""Default of save_steps in transformers' `training_args.py`."""


class Pauses(NamedTuple):
    """The pauses of one run, in optimizer steps."""

    save_every: int | None = None
    """Steps between checkpoints; None if none is saved before the end."""
    save_key: str = "save_steps"
    """The key of `job.trainer` that states it."""
    evaluate_every: int | None = None
    """Steps between evaluations; None if there are none."""
    evaluated_sequences: int = 0
    """Sequences per evaluation; 0 also if the number is unknown."""

    def saves(self, steps: int) -> int:
        """Return the number of checkpoints in `steps`."""
        return steps // self.save_every if self.save_every else 0

    def evaluations(self, steps: int) -> int:
        """Return the number of evaluations in `steps`."""
        return steps // self.evaluate_every if self.evaluate_every else 0


def pauses_of(values: Mapping[str, Any], job: Job, steps: int | None) -> Pauses:
    """Return the pauses for keys of a transformers-based trainer (trainer_callback.py, DefaultFlowCallback)."""
    save_every = _every(values, "save", "steps", job, steps)
    part = values.get("val_size", values.get("split_dataset_ratio")) or 0
    count = part * (job.samples or 0) if part < 1 else part
    return Pauses(
        save_every=save_every,
        evaluate_every=_every(values, "eval", "no", job, steps),
        evaluated_sequences=int(count),
    )


def _every(values: Mapping[str, Any], what: str, usual: str, job: Job, steps: int | None) -> int | None:
    strategy = values.get(f"{what}_strategy", usual)
    if strategy == "epoch":
        return None if steps is None else math.ceil(steps / max(1.0, job.epochs))
    every = values.get(f"{what}_steps") or values.get("save_steps") or _USUAL_EVERY
    if strategy != "steps":
        return None
    return max(1, int(every * (steps or 0))) if every < 1 else int(every)
