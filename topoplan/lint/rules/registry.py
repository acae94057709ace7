"""All rules of `topoplan check`: the general ones, and those of each trainer's wing."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.lint.rules import (
    bundle,
    deepspeed,
    environment,
    files,
    launch,
    launch_megatron,
    launch_nodes,
    launch_slurm,
    mca_layouts,
    package_faults,
    shell,
    yaml,
)
from topoplan.lint.rules.deepspeed_document import RULES as DEEPSPEED
from topoplan.lint.rules.launch_facts import RULES as LAUNCH
from topoplan.reading.rules import Rule
from topoplan.trainers.llamafactory import rules as llamafactory
from topoplan.trainers.swift import rules as swift
from topoplan.trainers.trinity import rules as trinity

MODULES = (
    shell,
    environment,
    files,
    launch,
    launch_nodes,
    launch_slurm,
    launch_megatron,
    yaml,
    llamafactory,
    mca_layouts,
    package_faults,
    deepspeed,
    swift,
    trinity,
    bundle,
)
"""Each has `findings(setup)`. Of findings at one place the order here is the one in which they are told."""

_TABLES = (
    shell.RULES,
    environment.RULES,
    LAUNCH,
    yaml.RULES,
    llamafactory.RULES,
    mca_layouts.RULES,
    package_faults.RULES,
    DEEPSPEED,
    swift.RULES,
    trinity.RULES,
)


def all_rules() -> Iterator[Rule]:
    """Every text of every rule; the texts of one rule follow each other."""
    for table in _TABLES:
        yield from table.values()
    yield from environment.rules_of_catalog()
