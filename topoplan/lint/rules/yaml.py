"""Configurations whose line breaks were lost on the way, and pieces of one that a page shows."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding, Severity
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Setup

RULES = read_rules(__package__, "yaml.toml")


def findings(setup: Setup) -> Iterator[Finding]:
    """Of a block in a page nobody would think that it can be read so; a file somebody means to use."""
    for part in setup.parts:
        if part.is_piece:
            yield RULES["yaml-piece"].found(part, 1)
    for configuration in setup.configurations:
        part = configuration.part
        if part.unfolded and not configuration.from_command:
            level: Severity = "note" if part.label else "error"
            yield RULES["yaml-lost-line-breaks"].found(part, 1, level=level, count=len(configuration.source.data))
