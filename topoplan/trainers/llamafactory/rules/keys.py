"""Which trainer keys a LLaMA-Factory configuration may hold, and under which name one of them is known today."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration, Setup
from topoplan.trainers.llamafactory.key_list import Key, keys_for, newer_than
from topoplan.units import named

RENAMED = {"evaluation_strategy": "eval_strategy"}
"""Names that every supported transformers refuses, and the ones that took their place (transformers 4.46)."""


def keys_of(setup: Setup, configuration: Configuration) -> Mapping[str, Key]:
    """The keys that LLaMA-Factory's parser takes, on the path that trains this configuration."""
    return keys_for(setup.path_of(configuration) or "plain")


def key_of(setup: Setup, configuration: Configuration, name: str) -> Key | None:
    """What the parser knows of a key, by its name of today."""
    return keys_of(setup, configuration).get(RENAMED.get(name, name))


def newer_findings(
    configuration: Configuration, since: Mapping[str, str], package: str, older: str
) -> Iterator[Finding]:
    """A note for the keys that a package has only since a version, one a version; `older` is one that refuses them."""
    by_version: dict[str, list[str]] = {}
    for key in configuration.source.data:
        if key in since:
            by_version.setdefault(since[key], []).append(key)
    for version, keys in by_version.items():
        what = f"{named(keys, 4)} {'needs' if len(keys) == 1 else 'need'} {newer_than(version, package)}"
        rule = "swift-new-argument" if package == "ms-swift" else "llamafactory-new-key"
        yield found(configuration, rule, "note", keys[0], what, why=f"{older} stops at keys that it does not know")
