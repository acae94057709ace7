"""Layout rules that a configuration breaks, each reported at the line of the key responsible."""

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
"""Rules whose violation a trainer still runs, at the speed of the network between nodes."""


def broken_rules(spec: Spec, layout: Layout) -> list[tuple[LayoutRule, str]]:
    """Return the rules that a layout breaks, each with its equation; at most one rule per key, the first."""
    broken: dict[str, tuple[LayoutRule, str]] = {}
    case = case_of(spec, layout.backend)
    for rule in engine_of(layout.backend).rules:
        try:
            equation = rule.failed(case, layout)
        except LayoutError:  # stages that do not divide evenly; a separate rule reports them
            continue
        if equation:
            broken.setdefault(KEYS_OF_RULE[rule.name][0], (rule, equation))
    return list(broken.values())


def of_layout(rule: LayoutRule) -> Rule:
    """Return an engine's layout rule as a rule of `check`."""
    return Rule(
        id=f"layout-{rule.name}",
        level="warning" if rule.name in SLOW_RULES else "error",
        reads="layouts that `--cluster` predicts",
        what=f"the layout breaks the rule {rule.name}: the equation that fails, with its numbers",
        why=rule.source,
        remedy=rule.fix,
    )


def legality_findings(translation: Translation) -> Iterator[Finding]:
    """Yield a finding for each broken rule."""
    # Without a path, host_memory may be unstated; a separate finding reports the host memory that offloading takes.
    spec = replace(translation.spec, path=None)
    for rule, equation in broken_rules(spec, translation.layout):
        line = key_line(translation.keys.configuration, KEYS_OF_RULE[rule.name])
        so = "it runs, and slowly" if rule.name in SLOW_RULES else "the trainer cannot run it"
        part = translation.configuration.part
        yield of_layout(rule).found(part, line, what=equation, why=f"{so}: {rule.source}")
