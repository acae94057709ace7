"""The Python that a script makes an environment with, beside the trainers that it installs there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from packaging.specifiers import SpecifierSet

from topoplan.lint.rules.environment import RULES
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup

_MADE_WITH = re.compile(
    r"(?:conda|mamba)\s+create\b[^\n#]*?\bpython=+(\d+\.\d+)"
    r"|\buv\s+venv\b[^\n#]*?(?:--python|-p)[ =](?:python)?(\d+\.\d+)"
    r"|\bpython(\d+\.\d+)\s+-m\s+venv\b|\bvirtualenv\b[^\n#]*?(?:--python|-p)[ =](?:python)?(\d+\.\d+)"
)
_NEEDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "llamafactory": ((">=0.9.5", ">=3.11"),),
    "ms-swift": ((">=3", ">=3.9"),),
    "trinity-rft": ((">=0.1", ">=3.10,<3.13"),),
    "transformers": ((">=5,<5.20", ">=3.10"), (">=5.20", ">=3.11")),
    "megatron-core": ((">=0.17", ">=3.12"),),
}
"""Versions of a package and the Python of their metadata (Requires-Python)."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Scripts that pin a package and make an environment that is too old, or too new, for it."""
    pins = dict(setup.pins)
    for part in setup.parts:
        made = [(match, next(filter(None, match.groups()))) for match in _MADE_WITH.finditer(part.text)]
        if part.kind != "shell" or len(made) != 1:
            continue
        (match, python) = made[0]
        line = part.text.count("\n", 0, match.start()) + 1
        for package, rows in _NEEDS.items():
            version = pins.get(package, "")
            wanted = [need for versions, need in rows if version and SpecifierSet(versions).contains(version)]
            if wanted and not SpecifierSet(wanted[0]).contains(python):
                yield RULES["env-python"].found(
                    part, line, package=package, version=version, needed=wanted[0], python=python
                )
