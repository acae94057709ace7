"""Flattening of configurations whose keys are in nested blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from topoplan.reading.interpolation import filled
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs.source import KeyPath, at, path_of


def flattened(
    configuration: Configuration, setup: Setup, blocks: Iterable[str], keys: Mapping[str, str], **said: Any
) -> Configuration:
    """Return a configuration with the keys of some blocks, and renamed single values, at the top level.

    `keys` maps a new name to the path of its value. Interpolations are resolved and lines are kept. The keys in `said`
    override, and have no lines.
    """
    source = configuration.source
    places = {name: path_of(place) for name, place in keys.items()}
    for block in map(path_of, blocks):
        found = at(source.data, block)
        places |= {name: (*block, name) for name in (found if isinstance(found, Mapping) else ())}
    data = {name: filled(at(source.data, place), source.data, setup.environment) for name, place in places.items()}
    lines: dict[KeyPath, int] = {(name,): line for name, place in places.items() if (line := source.lines.get(place))}
    known = {name: value for name, value in data.items() if value is not None}
    flat = replace(source, data=known | said, lines=lines, old_booleans=frozenset())
    return replace(configuration, source=flat)
