"""The Python version that a script creates an environment with, compared with what the installed packages need."""

from __future__ import annotations

import re
from collections.abc import Iterator

from topoplan.catalog.packages import allows, packages
from topoplan.lint.rules.environment import RULES
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup

_MADE_WITH = re.compile(
    r"(?:conda|mamba)\s+create\b[^\n#]*?\bpython=+(\d+\.\d+)"
    r"|\buv\s+venv\b[^\n#]*?(?:--python|-p)[ =](?:python)?(\d+\.\d+)"
    r"|\bpython(\d+\.\d+)\s+-m\s+venv\b|\bvirtualenv\b[^\n#]*?(?:--python|-p)[ =](?:python)?(\d+\.\d+)"
)


def findings(setup: Setup) -> Iterator[Finding]:
    """Report scripts that pin a package and create an environment whose Python is too old or too new for it."""
    pins = {pin.package: pin.version for pin in setup.pins}
    for part in setup.parts:
        made = [(match, next(filter(None, match.groups()))) for match in _MADE_WITH.finditer(part.text)]
        if part.kind != "shell" or len(made) != 1:
            continue
        (match, python) = made[0]
        line = part.text.count("\n", 0, match.start()) + 1
        for name, package in packages().items():
            version = pins.get(name, "")
            for needed in package.pythons(version):
                if not allows(needed, python):
                    yield RULES["env-python"].found(
                        part, line, package=name, version=version, needed=needed, python=python
                    )
