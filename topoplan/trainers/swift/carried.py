"""Keys of a user's ms-swift command or file that go with its job whatever plan is chosen: schedule, LoRA, logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.reading.values import Keys, value_of
from topoplan.specs.job import Job
from topoplan.specs.passed_on import TRAINER_KEYS_OF_JOB, TRAINER_KEYS_OF_LAYOUT
from topoplan.trainers.carried import common
from topoplan.trainers.swift.arguments import DECIDED, OF_THE_JOB, Command, accepted, arguments_of

_OF_THE_RUN = frozenset(
    [
        *("model", "model_type", "check_model", "use_hf", "dataset", "output_dir", "ddp_timeout"),
        *("resume_from_checkpoint", "mcore_model", "adapters", "mcore_adapter", "load", "save", "merge_lora"),
        *("learning_rate", "lr", "num_train_epochs", "dataset_num_proc", "dataloader_num_workers"),
        *("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "attn_impl"),
        *("rlhf_type", "task_type", "num_labels"),
    ]
)
"""Arguments of a single run, which every plan sets itself, or which are read elsewhere."""

_OF_MEGATRON = {"lr": "learning_rate", "max_epochs": "epochs"}
"""Arguments of `megatron sft`, the latter until ms-swift 3, and the keys of a job that they are."""


def carried(keys: Keys, job: Job, *, rows: Mapping[str, Any], commands: tuple[Command, ...]) -> Mapping[str, Any]:
    """Return the keys of the job that no prediction reads.

    Under `trainer` are arguments that all of the commands which may train the job accept. `rows` are the arguments that
    express a layout.
    """
    of_plan = {name for command in commands for name in DECIDED[command]}
    not_these = {*_OF_THE_RUN, *OF_THE_JOB, *TRAINER_KEYS_OF_JOB, *TRAINER_KEYS_OF_LAYOUT, *rows, *of_plan}
    trainer = dict(job.trainer)
    for key in keys.configuration.source.data:
        name = arguments_of(commands[0]).renamed.get(key, key)
        if name not in not_these:
            values = [accepted(name, value_of(keys.configuration, key), command) for command in commands]
            if None not in values:
                trainer[name] = values[0]
    of_megatron = {own: keys.number(name) for name, own in _OF_MEGATRON.items() if keys.given(name) is not None}
    return {**common(keys, job), **of_megatron, **({"trainer": trainer} if trainer else {})}
