"""What is wrong with a configuration, where it stands, why it matters and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topoplan.reading.parts import Part

Severity = Literal["error", "warning", "note"]
"""error: it will not start, or trains something else than is written. warning: it works, worse than it could or only by
luck. note: worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines of a part's text and what takes their place."""

    first_line: int
    """From 1, in the text of the part."""
    last_line: int
    """The last one that is replaced; `first_line - 1` inserts before `first_line`."""
    text: str
    """New lines without the last line break; empty removes the old ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong or worth knowing."""

    rule: str
    """Name of the rule, for programs: `mca-ignored-key`."""
    severity: Severity
    part: Part
    line: int | None = None
    """In the text of the part, from 1; None where it is about the whole of it, or about something that is missing."""
    what: str
    """One sentence without a full stop: what is written there, and what it does."""
    why: str = ""
    """The reason, where `what` does not say it."""
    remedy: str = ""
    """What to do."""
    holds: str = ""
    """At which versions of a package it is so, as pip writes them: `ms-swift>=4`; empty: at all that are known."""
    edits: tuple[Edit, ...] = ()
    """How `--fix` does it; empty where only a person can."""

    @property
    def place(self) -> str:
        """`file:line`, or the file alone."""
        return self.part.place(self.line)
