"""Which trainer keys a LLaMA-Factory configuration may hold, and under which name one of them is known today."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import whole
from topoplan.trainers.llamafactory.key_list import Key, keys_for

_LARGEST = 65536

RENAMED = {"evaluation_strategy": "eval_strategy"}
"""Names that every supported transformers refuses, and the ones that took their place (transformers 4.46)."""


def keys_of(setup: Setup, configuration: Configuration) -> Mapping[str, Key]:
    """The keys that LLaMA-Factory's parser takes, on the path that trains this configuration."""
    return keys_for(setup.path_of(configuration) or "plain")


def key_of(setup: Setup, configuration: Configuration, name: str) -> Key | None:
    """What the parser knows of a key, by its name of today."""
    return keys_of(setup, configuration).get(RENAMED.get(name, name))


def degree(configuration: Configuration, name: str) -> int | None:
    """`tensor`, `pipeline` and so on: the parallel size, 1 where it is not set, None where it is no size."""
    value = whole(configuration, f"{name}_size", 1)
    return value if value is not None and 1 <= value <= _LARGEST else None
