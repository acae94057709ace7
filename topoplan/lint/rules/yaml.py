"""Configurations that lost their line breaks, and excerpts of configurations."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding, Severity
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Setup

RULES = read_rules(__package__, "yaml.toml")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report excerpts and lost line breaks, the latter as an error in a file and as a note in a block of a page."""
    for part in setup.parts:
        if part.is_excerpt:
            yield RULES["yaml-piece"].found(part, 1)
    for configuration in setup.configurations:
        part = configuration.part
        if part.unfolded and not configuration.from_command:
            level: Severity = "note" if part.label else "error"
            yield RULES["yaml-lost-line-breaks"].found(part, 1, level=level, count=len(configuration.source.data))
