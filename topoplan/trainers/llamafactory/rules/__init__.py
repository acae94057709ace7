"""The rules on LLaMA-Factory's configurations, for all training paths."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.trainers import fault_rules
from topoplan.trainers.llamafactory.rules import launch, llamafactory, mca, mca_layouts, table, yaml_values

RULES = {**table.RULES, **mca_layouts.RULES, **fault_rules.RULES}


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of LLaMA-Factory launches and configurations, starting with values that YAML misreads."""
    for module in (launch, yaml_values, llamafactory, mca):
        yield from module.findings(setup)
