"""Rules that the layout of a configuration breaks, each at the line of the key that decides it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from topoplan.engines.registry import engine_of
from topoplan.engines.rule import Rule as LayoutRule
from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.lint.translate import Translation
from topoplan.reading.finding import Finding
from topoplan.reading.rules import Rule
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.layout_keys import KEYS_OF_RULE, key_line

SLOW_RULES = frozenset(["tp-in-nvlink-domain"])
"""A trainer runs what breaks them, at the speed of the network between nodes."""


def broken_rules(spec: Spec, layout: Layout) -> list[tuple[LayoutRule, str]]:
    """Every rule that a layout breaks, with its equation; of those that one key decides, the first."""
    broken: dict[str, tuple[LayoutRule, str]] = {}
    case = case_of(spec, layout.backend)
    for rule in engine_of(layout.backend).rules:
        try:
            equation = rule.failed(case, layout)
        except LayoutError:  # stages that do not divide, which a rule of their own tells
            continue
        if equation:
            broken.setdefault(KEYS_OF_RULE[rule.name][0], (rule, equation))
    return list(broken.values())


def of_layout(rule: LayoutRule) -> Rule:
    """An engine's rule as one of `check`."""
    return Rule(
        id=f"layout-{rule.name}",
        level="warning" if rule.name in SLOW_RULES else "error",
        reads="layouts that `--cluster` predicts",
        what=f"the layout breaks the rule {rule.name}: the equation that fails, with its numbers",
        why=rule.source,
        remedy=rule.fix,
    )


def legality_findings(translation: Translation) -> Iterator[Finding]:
    """A finding for each broken rule."""
    # What is offloaded has a finding of its own, with the host memory that it takes.
    spec = replace(translation.spec, path=None)
    for rule, equation in broken_rules(spec, translation.layout):
        line = key_line(translation.keys.configuration, KEYS_OF_RULE[rule.name])
        so = "it runs, and slowly" if rule.name in SLOW_RULES else "the trainer cannot run it"
        part = translation.configuration.part
        yield of_layout(rule).found(part, line, what=equation, why=f"{so}: {rule.source}")
