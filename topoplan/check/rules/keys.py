"""Which trainer keys a LLaMA-Factory configuration may hold, and under which name one of them is known today."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.check.read.setup import Configuration, Setup
from topoplan.emit.trainer_keys import Key, known_keys, plain_keys

RENAMED = {"evaluation_strategy": "eval_strategy"}
"""Names that every supported transformers refuses, and the ones that took their place (transformers 4.46)."""


def keys_of(setup: Setup, configuration: Configuration) -> Mapping[str, Key]:
    """The keys that LLaMA-Factory's parser takes, on the path that trains this configuration."""
    return known_keys() if setup.uses_mca(configuration) else plain_keys()


def key_of(setup: Setup, configuration: Configuration, name: str) -> Key | None:
    """What the parser knows of a key, by its name of today."""
    return keys_of(setup, configuration).get(RENAMED.get(name, name))
