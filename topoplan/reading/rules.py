"""The rules of `topoplan check`: each rule's texts stand in a table beside the code that detects it.

A table is a TOML file with one section per rule, named by the rule's id. If a rule has several texts, a dot and a word
follow the id:

    [swift-warmup-ratio]
    level = "error"
    what = "--warmup_ratio {ratio:g} must be less than 1"
    remedy = "use --warmup_steps for a number of steps"
    fix.name = "warmup_steps"

`holds` names the package versions to which the rule applies; the finding is a note if the version is unknown. `reads`
and `source` at the top of a file are the defaults of its rules. Placeholders in braces are filled in when the rule
fires; `{key}` is always the key at fault.
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
    """Identifier in JSON output and for `--select`, such as `swift-warmup-ratio`."""
    level: Severity
    reads: str
    """What the rule examines, for the documentation."""
    what: str
    """Template of one sentence without a full stop: what is written, and what it does."""
    why: str = ""
    remedy: str = ""
    holds: str = ""
    """Package versions to which the rule applies, such as `ms-swift>=4`; empty for all known versions."""
    source: str = ""
    """File and function of the trainer or tool that the rule is derived from."""
    fix: Mapping[str, Any] = field(default_factory=dict)
    """How `--fix` corrects the key: `drop = true`, or the `name` and `value` to replace it with."""

    def at(
        self,
        configuration: Configuration,
        place: str | KeyPath | None,
        /,
        *,
        edits: tuple[Edit, ...] | None = None,
        **said: Any,
    ) -> Finding:
        """Return a finding at a top-level key, at a path, or about the configuration as a whole."""
        path: KeyPath = (place,) if isinstance(place, str) else place or ()
        if edits is None:
            edits = self._edits(configuration, path)
        said = {"key": path[-1], **said} if path else said
        return self.found(configuration.part, configuration.line(*path), edits=edits, **said)

    def on(self, launch: Launch, where: int | Option | Variable | None = None, /, **said: Any) -> Finding:
        """Return a finding on a launch: at a line, an option, a variable set in the same part, or its first line.

        An option from the launcher's file is found there.
        """
        if isinstance(where, Option) and where.file is not None:
            return self.found(where.file, where.line, **said)
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
        """Return a finding at a line; `words` fill in the templates, and texts given here override the rule's own."""
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
    """Read a table of rules from a package. Returns rules by section name."""
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
