"""How the files and commands of all trainers are known, and of what they are started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.reading.recogniser import SURE, Recogniser, Recognisers
from topoplan.trainers.llamafactory.key_list import deepspeed_keys
from topoplan.trainers.llamafactory.reading import LLAMAFACTORY
from topoplan.trainers.swift.reading import MEGATRON, SWIFT
from topoplan.trainers.trinity.reading import TRINITY

_OF_DEEPSPEED = frozenset(["zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"])
_OF_ACCELERATE = frozenset(["compute_environment", "distributed_type"])


def _deepspeed(data: Mapping[str, Any], _known: int) -> float:
    is_likely = "train_batch_size" in data and 2 * len(data.keys() & deepspeed_keys()) >= len(data)
    return SURE if data.keys() & _OF_DEEPSPEED or is_likely else 0.0


def _accelerate(data: Mapping[str, Any], _known: int) -> float:
    return SURE if data.keys() & _OF_ACCELERATE else 0.0


RECOGNISERS: Recognisers = (
    Recogniser(trainer="deepspeed", claim=_deepspeed),
    Recogniser(trainer="accelerate", claim=_accelerate),
    TRINITY,
    LLAMAFACTORY,
    SWIFT,
    MEGATRON,
)
