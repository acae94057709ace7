"""One rule of what makes a layout illegal: its name, its source and, when it fails, its equation with the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    name: str
    source: str
    failed: Callable[[Spec, Layout], str | None]
    """The failed equation, or None."""
    fix: str


def broken_rule(spec: Spec, layout: Layout, rules: tuple[Rule, ...]) -> tuple[Rule, str] | None:
    """The first rule that a layout breaks, with its failed equation."""
    for rule in rules:
        if equation := rule.failed(spec, layout):
            return rule, equation
    return None
