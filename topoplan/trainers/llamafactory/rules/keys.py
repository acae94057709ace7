"""The keys that a LLaMA-Factory configuration may hold, and the current names of renamed ones."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import whole
from topoplan.trainers.llamafactory.key_list import Key, keys_for

_LARGEST = 65536

RENAMED = {"evaluation_strategy": "eval_strategy"}
"""Old -> new names; every supported transformers refuses the old ones (transformers 4.46)."""


def keys_of(setup: Setup, configuration: Configuration) -> Mapping[str, Key]:
    """Return the keys that LLaMA-Factory's parser accepts on the configuration's training path."""
    return keys_for(setup.training_path(configuration) or "plain")


def key_of(setup: Setup, configuration: Configuration, name: str) -> Key | None:
    """Return the parser's entry for a key, which may have its old name."""
    return keys_of(setup, configuration).get(RENAMED.get(name, name))


def degree(configuration: Configuration, name: str) -> int | None:
    """Return the parallel size of `tensor_model_parallel` and the like: 1 if it is not set, None if it is invalid."""
    value = whole(configuration, f"{name}_size", 1)
    return value if value is not None and 1 <= value <= _LARGEST else None
