"""Trials: a few steps of a job, run to be measured, in the keys of transformers; and generated samples for them.

Samples are generated if the real dataset is not ready, as long as the plan assumes samples to be. They consist of
common English words in random order, each a single token in nearly every tokenizer. Lengths are therefore right to
within a few tokens, and tokens vary, as a mixture of experts requires.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from topoplan.errors import SpecError
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec

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


GENERATED = "topoplan_samples"
"""Value of `job.dataset` that stands for generated samples."""
DIRECTORY = "samples"
"""Directory of the samples in a bundle."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work government number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service friend"
    " father power hour game line end member law car city community name president team minute idea body information"
    " back parent face others level office door health person art war history party result change morning reason"
    " research girl guy moment air teacher force education"
)
_DIFFERENT, _DIFFERENT_LENGTHS = 8, 32
"""Number of samples in the file if all have the same length, and if lengths vary."""
_MOST_WORDS = 1_500_000
"""Upper limit of the file's words, about 9 MB; there are always at least two samples."""
_MOST_TOKENS = 20_000_000
"""Upper limit of the tokens that a node tokenizes, in well under a minute."""
_BATCHES = 64
_TEMPLATE_TOKENS = 16
"""Approximate length of a chat template in tokens."""


def is_generated(job: Job) -> bool:
    """Whether a job trains on generated samples."""
    return job.dataset == GENERATED


def refuse_images(spec: Spec) -> None:
    """Raise SpecError for a job whose samples contain images."""
    if spec.model.vision is not None and spec.job.images_per_sequence:
        remedy = "name job.dataset in the spec, or set images_per_sequence: 0 to try the layouts on text"
        raise SpecError(f"samples with images are not made up for {spec.model.name}", where="job", remedy=remedy)


def records(spec: Spec, *, shorter_by: int = 0) -> list[dict[str, Any]]:
    """Return the samples of a file: messages of user and assistant; a text for stage pt, two answers for dpo.

    If the length of samples is unknown, they fill seq_len minus `shorter_by`, and are cut to it.
    """
    job = spec.job
    texts = iter(_texts(tuple(_lengths(job, shorter_by))))
    if job.stage == "pt":
        return [{"text": text} for text in texts]
    if job.stage == "dpo":
        return [{"prompt": "Go on.", "chosen": one, "rejected": next(texts, one)} for one in texts]
    return [
        {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": text}]} for text in texts
    ]


def lines(made: Sequence[dict[str, Any]]) -> str:
    """Return the text of a JSON Lines file."""
    return "".join(f"{json.dumps(one)}\n" for one in made)


def how_many(spec: Spec) -> int:
    """Return the size of a dataset that is enough for a trial, repeating the file's samples."""
    job = spec.job
    mean = min(job.lengths.mean, job.seq_len) if job.lengths else job.seq_len
    step = job.global_batch_size * (math.ceil(job.seq_len / mean) if job.packs else 1)
    return max(step, min(_BATCHES * step, int(_MOST_TOKENS / mean)))


def _lengths(job: Job, shorter_by: int) -> Iterator[int]:
    spare = 0 if job.stage == "pt" else _TEMPLATE_TOKENS
    if job.lengths is None:
        for _ in range(max(2, min(_DIFFERENT, _MOST_WORDS // job.seq_len))):
            yield max(1, job.seq_len - shorter_by)
        return
    mean = max(1, int(min(job.lengths.mean, job.seq_len)))
    count = max(2, min(_DIFFERENT_LENGTHS, _MOST_WORDS // mean))
    for place in range(count):
        tokens = min(job.lengths.quantile((place + 0.5) / count), job.seq_len - shorter_by)
        yield max(1, tokens - spare)


@lru_cache(maxsize=4)
def _texts(lengths: Sequence[int]) -> list[str]:
    draw, words = random.Random(0), _WORDS.split()
    return [" ".join(draw.choices(words, k=length)) for length in lengths]
