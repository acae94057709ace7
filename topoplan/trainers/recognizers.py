"""Recognition of all trainers' and launchers' files and commands, and the codecs that interpret them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.reading.recognizer import SURE, Recognizer, Recognizers
from topoplan.reading.setup import Configuration, Setup
from topoplan.trainers import deepspeed_alone, megatron_lm, registry
from topoplan.trainers.codec import Codec
from topoplan.trainers.llamafactory import bridge_job, v1_job
from topoplan.trainers.llamafactory.key_list import deepspeed_keys
from topoplan.trainers.others import others
from topoplan.trainers.roll import codecs as roll
from topoplan.trainers.roll.role import ROLL
from topoplan.trainers.trainer import Trainer

_OF_DEEPSPEED = frozenset(["zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"])
_OF_ACCELERATE = frozenset(["compute_environment", "distributed_type"])


def _deepspeed(data: Mapping[str, Any], _known: int) -> float:
    is_likely = "train_batch_size" in data and 2 * len(data.keys() & deepspeed_keys()) >= len(data)
    return SURE if data.keys() & _OF_DEEPSPEED or is_likely else 0.0


def _accelerate(data: Mapping[str, Any], _known: int) -> float:
    return SURE if data.keys() & _OF_ACCELERATE else 0.0


_STARTERS = (
    Recognizer(trainer="deepspeed", claim=_deepspeed),
    Recognizer(trainer="accelerate", claim=_accelerate),
)
_ONLY_READ = (ROLL, megatron_lm.MEGATRON_LM, v1_job.RECOGNIZED)
_CODECS = (
    *(deepspeed_alone.CODEC, roll.MEGATRON, roll.FSDP2),
    *(megatron_lm.CODEC, bridge_job.CODEC, v1_job.CODEC),
)
"""Codecs of files that are only read, never written."""


def recognizers() -> Recognizers:
    """Return the recognizers of launchers, of trainers that are only read, and of each trainer."""
    return (
        *_STARTERS,
        *_ONLY_READ,
        *(one.recognized for one in others().values()),
        *(one for trainer in registry.TRAINERS for one in trainer.recognizers),
    )


def trainer_of(configuration: Configuration) -> Trainer:
    """Return the trainer of a configuration; a lone DeepSpeed file is attributed to the first trainer."""
    name, (first, *_) = configuration.trainer, registry.TRAINERS
    return next((one for one in registry.TRAINERS if name in {each.trainer for each in one.recognizers}), first)


def codec_of(configuration: Configuration, setup: Setup) -> Codec | None:
    """Return the codec of a configuration; None if it is not predicted."""
    name = setup.training_path(configuration) or configuration.trainer
    codecs = (way.codec for trainer in registry.TRAINERS for way in trainer.training_paths)
    return next((one for one in (*codecs, *_CODECS) if one is not None and one.reads == name), None)
