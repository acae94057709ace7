"""The rules on ms-swift's launches and arguments."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.trainers.swift.rules import launch, rollout, swift
from topoplan.trainers.swift.rules.table import RULES as RULES


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of ms-swift's launches and arguments."""
    for module in (launch, swift, rollout):
        yield from module.findings(setup)
