"""Files that a command names and that are not here: what nobody looked at must not look like one without faults."""

from __future__ import annotations

import re
from collections.abc import Iterator

from topoplan.lint.rules.launch_facts import RULES, line_of
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.reading.words import is_open


def findings(setup: Setup) -> Iterator[Finding]:
    """The configurations that were not found, where no other file was given that may be the one."""
    if any(setup.model_key(one) and not one.from_command for one in setup.configurations):
        return
    for launch in setup.launches:
        name = launch.config_file
        if not name or launch.reads is not None or launch.part.label:
            continue
        if is_open(name):
            reason = f"the name {name} is known only when the script runs"
        else:
            reason = f"{name} is neither beside this file nor below the working directory"
        line = line_of(launch, re.compile(re.escape(name)))
        yield RULES["launch-file-not-found"].on(launch, line, reason=reason)
