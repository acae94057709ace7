"""Documents of blocks in blocks, brought to the top."""

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
    """What some blocks hold, and single values by other names (new name -> where it stands), at the top.

    All are filled in and keep their lines. What is `said` comes last, and has none.
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
