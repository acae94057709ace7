"""A trial: a few steps of a job, to be measured. What a trainer says of it, and its job in the keys of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.made_up import is_made_up

LONGER = 2
"""So many times the steps of a trial are asked of its trainer: it is ended before it comes to its end, where most
trainers save the model."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a trainer is made to do a few steps alone."""

    job: Callable[[Spec, int, str], Job]
    """The job of so many steps: it goes on for some more, saves and evaluates nothing, logs every step, and has the
    output directory of that name."""
    samples: Callable[[Spec], Mapping[str, str]]
    """Files of made-up samples, by their names in the bundle. The trainer's `start` says where they are."""


def trial_job(job: Job, steps: int, output: str, *, length: str = "max_steps") -> Job:
    """The job as a trial; `length` is the key for its number of steps."""
    dropped = {*_LENGTH, *_SAVING, *_EVALUATION, *_TELLING, *(_DATA if is_made_up(job) else ())}
    if job.trainer.get("save_strategy") != "no":  # which layouts are planned by: the overlap of gathering goes with it
        dropped.add("save_strategy")
    kept = {name: value for name, value in job.trainer.items() if name not in dropped and not name.startswith("eval_")}
    return replace(job, trainer={**kept, length: LONGER * steps, "save_steps": NEVER, "output_dir": output})
