"""Trainers that are recognized but not checked: their files and commands, with what these say about the training."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Setup
from topoplan.trainers.recognizers import others

RULES = read_rules(__package__, "others.toml")


def findings(setup: Setup) -> Iterator[Finding]:
    """Yield one note for each such configuration."""
    for configuration in setup.configurations:
        one = others().get(configuration.trainer)
        if one is not None and not (one.part and setup.launches):
            said = ", ".join(one.words(configuration, setup))
            yield RULES["other-trainer"].at(
                configuration, None, title=one.title, said=f": {said}" if said else "", why_not=one.why
            )
