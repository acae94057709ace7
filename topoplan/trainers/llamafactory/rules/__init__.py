"""The rules on LLaMA-Factory's configurations, whichever way they are trained."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.trainers.llamafactory.rules import llamafactory, mca, yaml_values
from topoplan.trainers.llamafactory.rules.table import RULES

__all__ = ["RULES", "findings"]


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in them, first of what YAML makes of them."""
    for module in (yaml_values, llamafactory, mca):
        yield from module.findings(setup)
