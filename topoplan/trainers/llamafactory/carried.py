"""Keys of a user's LLaMA-Factory file that go along with its job whatever plan is chosen: data, schedule, logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.reading.values import Keys, value_of
from topoplan.specs.job import Job
from topoplan.specs.passed_on import TRAINER_KEYS_OF_JOB, TRAINER_KEYS_OF_LAYOUT
from topoplan.trainers.carried import common
from topoplan.trainers.llamafactory.key_list import judge_key, known_keys, plain_keys, trainer_versions
from topoplan.trainers.llamafactory.plain_keys import DECIDED

_OF_THE_RUN = frozenset(
    [
        *("model_name_or_path", "do_train", "output_dir", "resume_from_checkpoint", "ddp_timeout"),
        *("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "optim", "flash_attn"),
        *("neat_packing", "sequence_packing"),
    ]
)
"""Keys of a single run, which every plan sets itself, or which are read elsewhere."""


def carried(keys: Keys, job: Job) -> Mapping[str, Any]:
    """Return the keys of the job that no prediction reads.

    Under `trainer` are non-default keys that LLaMA-Factory reads on every path that may train the job.
    """
    paths = ("mca", "plain") if job.finetuning == "full" else ("plain",)
    version, usual = trainer_versions()["llamafactory"], {**known_keys(), **plain_keys()}
    not_these = {*_OF_THE_RUN, *DECIDED, *TRAINER_KEYS_OF_JOB, *TRAINER_KEYS_OF_LAYOUT}
    trainer = dict(job.trainer)
    for key in keys.configuration.source.data:
        if key not in not_these:
            verdicts = [judge_key(key, value_of(keys.configuration, key), path=path, version=version) for path in paths]
            value = verdicts[0].value
            if not any(verdict.trouble for verdict in verdicts) and value not in (None, usual[key].default):
                trainer[key] = value
    named = {key: keys.text(key) for key in ("dataset_dir", "template") if keys.given(key) is not None}
    return {**common(keys, job), **named, **({"trainer": trainer} if trainer else {})}
