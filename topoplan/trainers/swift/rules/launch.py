"""Launchers around ms-swift's commands, which start torchrun themselves: ms-swift 4, `swift/cli/main.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import line_of, replaced
from topoplan.reading.setup import Launch, Setup
from topoplan.trainers.swift.reading import MEGATRON, SWIFT
from topoplan.trainers.swift.rules.table import RULES

_BARE = re.compile(r"(?<!\S)(swift|megatron)\s+(sft|pt|rlhf)(?!\S)")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report launchers that start the command wrongly, or a second time."""
    for launch in setup.launches:
        if launch.starter and launch.program in (SWIFT.command, MEGATRON.command):
            yield from _nested(launch)
            yield from _run_by_python(launch)


def _nested(launch: Launch) -> Iterator[Finding]:
    again = next((one for one in launch.variables if one.name in ("NPROC_PER_NODE", "NNODES")), None)
    if again is not None:
        yield RULES["launch-nested-torchrun.swift"].on(
            launch, called=launch.called, program=launch.program, variable=again.name
        )


def _run_by_python(launch: Launch) -> Iterator[Finding]:
    """Report `torchrun swift sft`: torchrun runs its program with Python unless --no_python is given."""
    if launch.starter != "torchrun" or {"no_python", "module"} & set(launch.options):
        return
    line = line_of(launch, _BARE)
    if line is not None:
        edits = replaced(launch, _BARE, r"--no_python \1 \2")
        yield RULES["launch-command-run-by-python"].on(launch, line, program=launch.program, edits=edits)
