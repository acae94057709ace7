"""The rules of `topoplan check`: what each of them says, told once in a table beside the code that finds it.

A table is TOML with a section a rule, under its id; a dot and a word follow where one id has several texts:

    [swift-warmup-ratio]
    level = "error"
    what = "--warmup_ratio {ratio:g} must be less than 1"
    remedy = "use --warmup_steps for a number of steps"
    fix.name = "warmup_steps"

`holds` says at which versions of a package it is so: it is a note where nobody says which version it is.
`reads` and `source` at the top of a file hold for its rules that have none of their own. What stands in braces is
filled in where the rule is found; `{key}` is always the key of the place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Edit, Finding, Severity
from topoplan.reading.parts import Part
from topoplan.reading.setup import Configuration, Launch, Option, Variable
from topoplan.specs.source import KeyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One text of one rule."""

    id: str
    """For programs and `--select`: `swift-warmup-ratio`."""
    level: Severity
    reads: str
    """What it looks at, for the documentation."""
    what: str
    """One sentence without a full stop, as a template: what is written there, and what it does."""
    why: str = ""
    remedy: str = ""
    holds: str = ""
    """At which versions of a package it is so, `ms-swift>=4`; empty: at all that are known."""
    source: str = ""
    """File and function of the trainer or tool that it follows."""
    fix: Mapping[str, Any] = field(default_factory=dict)
    """How `--fix` corrects the key: `drop = true`, or the `name` and `value` that it gets."""

    def at(
        self,
        configuration: Configuration,
        place: str | KeyPath | None,
        /,
        *,
        edits: tuple[Edit, ...] | None = None,
        **said: Any,
    ) -> Finding:
        """A finding at a key at the top, at a path, or about the whole of a configuration."""
        path: KeyPath = (place,) if isinstance(place, str) else place or ()
        if edits is None:
            edits = self._edits(configuration, path)
        said = {"key": path[-1], **said} if path else said
        return self.found(configuration.part, configuration.line(*path), edits=edits, **said)

    def on(self, launch: Launch, where: int | Option | Variable | None = None, /, **said: Any) -> Finding:
        """A finding on a launch: at a line, an option, a variable of the same part, or else at its first line."""
        if isinstance(where, Variable) and where.part is not launch.part:
            where = None
        line = where if isinstance(where, int | None) else where.line
        return self.found(launch.part, line or launch.first_line, **said)

    def found(
        self,
        part: Part,
        line: int | None,
        /,
        *,
        level: Severity | None = None,
        what: str = "",
        why: str = "",
        remedy: str = "",
        edits: tuple[Edit, ...] = (),
        **words: Any,
    ) -> Finding:
        """A finding at a line; `words` fill in the texts, and what is given takes the place of the rule's own."""
        return Finding(
            rule=self.id,
            severity=level or self.level,
            part=part,
            line=line,
            what=what or self.what.format(**words),
            why=why or self.why.format(**words),
            remedy=remedy or self.remedy.format(**words),
            holds=self.holds.format(**words),
            edits=edits,
        )

    def _edits(self, configuration: Configuration, path: KeyPath) -> tuple[Edit, ...]:
        if not self.fix or not path:
            return ()
        if "drop" in self.fix:
            return drop(configuration, path)
        return change(configuration, path, **self.fix)


def read_rules(package: str, name: str) -> Mapping[str, Rule]:
    """The table of that name in a package: section -> rule."""
    document = tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
    shared = {key: document.pop(key) for key in ("reads", "source") if key in document}
    rules: dict[str, Rule] = {}
    for rule_id, section in document.items():
        own = {key: value for key, value in section.items() if key == "fix" or not isinstance(value, dict)}
        if own:
            rules[rule_id] = Rule(id=rule_id, **{**shared, **own})
        for case, its in section.items():
            if case not in own:
                rules[f"{rule_id}.{case}"] = Rule(id=rule_id, **{**shared, **its})
    return rules
