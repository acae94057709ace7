"""Keys that a trainer only has since some version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topoplan.reading.setup import Configuration
from topoplan.units import named


def newer_keys(configuration: Configuration, since: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield per version: the first of its keys in a configuration, a phrase like `a, b and c need`, and the version."""
    by_version: dict[str, list[str]] = {}
    for key in configuration.source.data:
        if key in since:
            by_version.setdefault(since[key], []).append(key)
    for version, keys in by_version.items():
        yield keys[0], f"{named(keys, 4)} {'needs' if len(keys) == 1 else 'need'}", version
