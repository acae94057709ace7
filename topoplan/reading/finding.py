"""Findings: what is wrong with a configuration, where, why it matters and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from topoplan.reading.parts import Part

Severity = Literal["error", "warning", "note"]
"""error: training will not start, or does something other than what is written. warning: it works, but worse than it
could or only by luck. note: worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A range of lines of a part's text and its replacement."""

    first_line: int
    """Line number in the text of the part, counted from 1."""
    last_line: int
    """The last line to replace; `first_line - 1` inserts the text before `first_line`."""
    text: str
    """New lines without the final line break; empty text deletes the old lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong or worth knowing."""

    rule: str
    """Identifier of the rule in JSON output, such as `mca-ignored-key`."""
    severity: Severity
    part: Part
    line: int | None = None
    """Line in the text of the part, from 1; None for a finding about the whole part or something missing from it."""
    what: str
    """One sentence without a full stop: what is written, and what it does."""
    why: str = ""
    """The reason, if `what` does not give it."""
    remedy: str = ""
    """What to do about it."""
    holds: str = ""
    """Package versions to which the finding applies, in pip's syntax: `ms-swift>=4`; empty for all known versions."""
    edits: tuple[Edit, ...] = ()
    """Edits with which `--fix` corrects it; empty if only a person can."""

    @property
    def place(self) -> str:
        """`file:line`, or only the file if there is no line."""
        return self.part.place(self.line)
