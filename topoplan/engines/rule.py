"""A rule that makes a layout illegal: its name, its source and, when it fails, its equation with numbers filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from topoplan.layout.layout import Layout
from topoplan.specs.case import Case


class Rule(NamedTuple):
    """One rule."""

    name: str
    source: str
    failed: Callable[[Case, Layout], str | None]
    """Returns the failed equation, or None if the rule holds."""
    fix: str
    """What would help."""
    fix_of: Callable[[Case, Layout], str] | None = None
    """What would help, with the numbers of a case and a layout; used instead of `fix` if given."""


class Broken(NamedTuple):
    """Why a layout is illegal, or refused by the trainers."""

    rule: str
    """Name of the rule."""
    equation: str
    """The failed equation with its numbers, or a trainer's sentence."""
    fix: str
    """What would help."""


def broken_rule(case: Case, layout: Layout, rules: tuple[Rule, ...]) -> Broken | None:
    """Return the first rule that a layout breaks, or None."""
    for rule in rules:
        if equation := rule.failed(case, layout):
            return Broken(rule.name, equation, rule.fix_of(case, layout) if rule.fix_of else rule.fix)
    return None
