"""Samples that nobody wrote, for a trial where the user's own are not ready: as long as the plan takes them to be.

They are common English words in no order, which nearly every tokenizer has as a token each. So lengths are right to a
few tokens, and tokens differ, as they must for a mixture of experts.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from topoplan.errors import SpecError
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec

MADE_UP = "topoplan_samples"
"""As `job.dataset`, stands for them."""
DIRECTORY = "samples"
"""Of a bundle."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work government number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service friend"
    " father power hour game line end member law car city community name president team minute idea body information"
    " back parent face others level office door health person art war history party result change morning reason"
    " research girl guy moment air teacher force education"
)
_DIFFERENT, _DIFFERENT_LENGTHS = 8, 32
"""Samples in the file, where all are alike in length and where they are not."""
_MOST_WORDS = 1_500_000
"""Of the file, some 9 MB; two samples there are at least."""
_MOST_TOKENS = 20_000_000
"""That a node tokenises, in well under a minute."""
_BATCHES = 64
_TEMPLATE_TOKENS = 16
"""Of a chat template, about."""


def is_made_up(job: Job) -> bool:
    """Whether a job trains on such samples."""
    return job.dataset == MADE_UP


def refuse_images(spec: Spec) -> None:
    """Raise SpecError for a job whose samples have images."""
    if spec.model.vision is not None and spec.job.images_per_sequence:
        remedy = "name job.dataset in the spec, or set images_per_sequence: 0 to try the layouts on text"
        raise SpecError(f"samples with images are not made up for {spec.model.name}", where="job", remedy=remedy)


def records(spec: Spec, *, shorter_by: int = 0) -> list[dict[str, Any]]:
    """The samples of a file: what a user and an assistant say; in stage pt a text, in dpo two answers.

    Where nobody says how long samples are, they fill seq_len, less `shorter_by`, and are cut to it.
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
    """A file of JSON lines."""
    return "".join(f"{json.dumps(one)}\n" for one in made)


def how_many(spec: Spec) -> int:
    """Samples of the data set, in which those of the file come again and again: enough for a trial."""
    job = spec.job
    mean = min(job.lengths.mean, job.seq_len) if job.lengths else job.seq_len
    step = job.global_batch_size * (math.ceil(job.seq_len / mean) if job.packs else 1)
    return max(step, min(_BATCHES * step, int(_MOST_TOKENS / mean)))


def _lengths(job: Job, shorter_by: int) -> Iterator[int]:
    """Words of each sample."""
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
