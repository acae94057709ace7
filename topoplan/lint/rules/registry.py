"""All rules of `topoplan check`: the general ones and those of each trainer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from topoplan.engines.registry import ENGINES
from topoplan.lint import prediction
from topoplan.lint.rules import (
    accelerate,
    bundle,
    deepspeed,
    environment,
    files,
    launch,
    launch_everywhere,
    launch_hosts,
    launch_nodes,
    launch_slurm,
    launch_together,
    launch_wrapped,
    only_read,
    others,
    python,
    shell,
    yaml,
)
from topoplan.lint.rules.deepspeed_document import RULES as DEEPSPEED
from topoplan.lint.rules.launch_table import RULES as LAUNCH
from topoplan.lint.rules.legality import of_layout
from topoplan.reading.rules import Rule
from topoplan.trainers import registry

_GENERAL = (
    shell,
    environment,
    python,
    files,
    launch,
    launch_nodes,
    launch_slurm,
    launch_everywhere,
    launch_hosts,
    launch_together,
    launch_wrapped,
    accelerate,
    yaml,
    others,
    only_read,
)
_LAST = (deepspeed, bundle)
_TABLES = (
    shell.RULES,
    environment.RULES,
    LAUNCH,
    accelerate.RULES,
    yaml.RULES,
    others.RULES,
    only_read.RULES,
    DEEPSPEED,
)


def _of_wings() -> list[Any]:
    return [import_module(trainer.rules) for trainer in registry.TRAINERS if trainer.rules]


def rule_modules() -> tuple[Any, ...]:
    """Return the modules with `findings(setup)`, in the order in which findings at one place are reported."""
    return (*_GENERAL, *_of_wings(), *_LAST)


def all_rules() -> Iterator[Rule]:
    """Yield every text of every rule; the texts of one rule are adjacent."""
    for table in (*_TABLES, *(module.RULES for module in _of_wings())):
        yield from table.values()
    yield from environment.rules_of_catalog()


def further_rules() -> Iterator[Rule]:
    """Yield the rules on bundles, on predictions for a cluster, and those of the engines."""
    yield from (*bundle.RULES.values(), *prediction.RULES.values())
    yield from map(of_layout, {rule.name: rule for engine in ENGINES for rule in engine.rules}.values())


@cache
def rule_ids() -> frozenset[str]:
    """Return the ids that a finding may have."""
    return frozenset(rule.id for rules in (all_rules(), further_rules()) for rule in rules)
