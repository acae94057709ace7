"""How often a run interrupts training to save or evaluate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from topoplan.specs.job import Job

_USUAL_EVERY = 500
"""Default of save_steps in transformers' `training_args.py`."""


class Pauses(NamedTuple):
    """The pauses of one run, in optimizer steps."""

    save_every: int | None = None
    """Steps between checkpoints; None if none is saved before the end."""
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
