"""Trials: a few steps of a job, run to be measured, and how to express them in the keys of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.generated_samples import is_generated

LONGER = 2
"""Factor by which the steps requested from the trainer exceed those of a trial, which is stopped before the end, when
most trainers save the model."""
NEVER = 1_000_000
"""More steps than a trial has."""
_LENGTH = ("max_steps", "train_iters", "warmup_steps", "warmup_ratio", "lr_warmup_iters", "lr_decay_iters")
_SAVING = ("save_steps", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "push_to_hub", "plot_loss")
_EVALUATION = (
    *(
        "val_size",
        "val_dataset",
        "split_dataset_ratio",
        "per_device_eval_batch_size",
        "do_eval",
        "predict_with_generate",
    ),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
)
_TELLING = ("logging_steps", "logging_first_step", "logging_dir", "report_to", "run_name")
_DATA = ("dataset", "dataset_dir", "tokenized_path", "streaming", "mix_strategy", "interleave_probs", "max_samples")


class Trial(NamedTuple):
    """How to make a trainer run only a few steps."""

    job: Callable[[Spec, int, str], Job]
    """Return a job for so many steps and an output directory of that name. It requests more steps than that, saves and
    evaluates nothing, and logs every step."""
    samples: Callable[[Spec], Mapping[str, str]]
    """Return files of generated samples by their names in the bundle. The trainer's `start` says where they are."""


def trial_job(job: Job, steps: int, output: str, *, length: str = "max_steps") -> Job:
    """Return the job as a trial; `length` is the key for its number of steps."""
    dropped = {*_LENGTH, *_SAVING, *_EVALUATION, *_TELLING, *(_DATA if is_generated(job) else ())}
    if job.trainer.get("save_strategy") != "no":  # "no" stays: plans depend on it
        dropped.add("save_strategy")
    kept = {name: value for name, value in job.trainer.items() if name not in dropped and not name.startswith("eval_")}
    return replace(job, trainer={**kept, length: LONGER * steps, "save_steps": NEVER, "output_dir": output})
