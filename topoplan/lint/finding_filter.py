"""Which findings are reported: those of the chosen rules, except where a comment in the file suppresses them.

`# topoplan: ignore[mca-hub-id]` goes on the line of the finding, on the line above it, or above the command that the
line belongs to; `# topoplan: ignore-file[launch]` goes anywhere in the file. Without brackets, it applies to all rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from topoplan.errors import InputError, nearest
from topoplan.lint.rules.registry import rule_ids
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup

_COMMENT = re.compile(r"(?:^|\s)#\s*topoplan:\s*ignore(?P<file>-file)?(?:\[(?P<rules>[^\]\n]*)\])?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingFilter:
    """Rules, selected by id or by the first words of their ids: `launch` selects every `launch-...`."""

    select: tuple[str, ...] = ()
    """Rules to report; empty for all."""
    ignore: tuple[str, ...] = ()

    def accepts(self, finding: Finding, setup: Setup) -> bool:
        """Whether a finding is reported."""
        if self.select and not _is_one(finding.rule, self.select):
            return False
        return not _is_one(finding.rule, self.ignore) and not _is_answered(finding, setup)


def chosen(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Split comma-separated names of rules. Raises InputError for a name that matches no rule."""
    found = tuple(name.strip() for text in names for name in text.split(",") if name.strip())
    known = rule_ids()
    for name in found:
        if not any(_is_one(rule, (name,)) for rule in known):
            raise InputError(
                f"there is no rule {name!r}",
                where=where,
                expected="expected the name in brackets after a finding, or its first words, such as `launch`",
                remedy=nearest(name, known) or "docs/checks.md lists them",
            )
    return found


def _is_one(rule: str, names: Iterable[str]) -> bool:
    """Whether a rule has one of these names, or an id that begins with one of them."""
    return any(rule == name or rule.startswith(f"{name}-") for name in names)


def _is_answered(finding: Finding, setup: Setup) -> bool:
    """Whether a comment in the file suppresses a finding."""
    lines = finding.part.text.split("\n")
    whole = next((part.text.split("\n") for part in setup.parts if part.name == finding.part.name), lines)
    comments = [
        match for line in _near(finding, lines, setup) for match in _COMMENT.finditer(line) if not match["file"]
    ]
    comments += [match for line in {*whole, *lines} for match in _COMMENT.finditer(line) if match["file"]]
    return any(match["rules"] is None or _is_one(finding.rule, _names(match)) for match in comments)


def _names(match: re.Match[str]) -> list[str]:
    return [name.strip() for name in match["rules"].split(",")]


def _near(finding: Finding, lines: Sequence[str], setup: Setup) -> Iterator[str]:
    """Yield the lines where a comment may suppress a finding: its own, and comments above it or above its command."""
    number = finding.line
    if number is None or not 0 < number <= len(lines):
        return
    yield lines[number - 1]
    firsts = {number}
    for launch in setup.launches:
        if launch.part == finding.part and launch.first_line <= number <= launch.last_line:
            firsts.add(launch.first_line)
    yield from (lines[first - 2] for first in firsts if first > 1 and lines[first - 2].lstrip().startswith("#"))
