"""Findings that only apply to some versions of a package, judged by the version that the files are for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from topoplan.catalog.packages import allows
from topoplan.reading.finding import Finding

_HOLDS = re.compile(r"([a-z0-9-]+)(.+)")


def judged(finding: Finding, versions: Mapping[str, str]) -> Finding | None:
    """Return a finding if it applies to these versions, as a note if the version is unknown; None otherwise."""
    match = _HOLDS.fullmatch(finding.holds)
    if match is None:
        return finding
    stated = versions.get(match[1])
    if stated is None:
        return replace(finding, severity="note")
    return finding if allows(match[2], stated) else None
