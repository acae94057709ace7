"""A finding about one key of a configuration."""

from __future__ import annotations

from topoplan.reading.finding import Edit, Finding, Severity
from topoplan.reading.setup import Configuration
from topoplan.specs.source import KeyPath


def found(
    configuration: Configuration,
    rule: str,
    severity: Severity,
    place: str | KeyPath | None,
    what: str,
    *,
    why: str = "",
    remedy: str = "",
    edits: tuple[Edit, ...] = (),
) -> Finding:
    """A finding at a key at the top, at a path, or about the whole of a configuration."""
    path: KeyPath = (place,) if isinstance(place, str) else place or ()
    return Finding(
        rule=rule,
        severity=severity,
        part=configuration.part,
        line=configuration.line(*path),
        what=what,
        why=why,
        remedy=remedy,
        edits=edits,
    )
