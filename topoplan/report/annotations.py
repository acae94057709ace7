"""Format findings for display next to the code: GitHub workflow commands and SARIF 2.1.0.

Sources: docs.github.com, Workflow commands for GitHub Actions; OASIS, Static Analysis Results Interchange Format
(SARIF) Version 2.1.0, sections 3.19, 3.27 and 3.49.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import topoplan
from topoplan.lint.rules.registry import all_rules, further_rules
from topoplan.reading.finding import Finding
from topoplan.reading.rules import Rule

SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


def github_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a workflow command for each finding."""
    for one in findings:
        line = "" if one.line is None else f",line={one.part.file_line(one.line)}"
        place = f"file={_escaped(one.part.name, _PROPERTY)}{line},title={_escaped(one.rule, _PROPERTY)}"
        yield f"::{_COMMANDS[one.severity]} {place}::{_escaped(message(one), _DATA)}"


def _escaped(text: str, marks: dict[str, str]) -> str:
    return "".join(marks.get(character, character) for character in text)


def message(finding: Finding) -> str:
    """Return what is wrong, why it matters and what to do, as one text."""
    remedy = f"remedy: {finding.remedy}" if finding.remedy else ""
    return "\n".join(filter(None, (finding.what, finding.why, remedy)))


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a SARIF log with one run and the rules of its findings."""
    told = sorted({one.rule for one in findings})
    every = sorted((*all_rules(), *further_rules()), key=lambda rule: rule.id)
    texts = {rule_id: list(rules) for rule_id, rules in groupby(every, key=lambda rule: rule.id)}
    driver = {
        "name": "topoplan",
        "version": topoplan.__version__,
        "rules": [_descriptor(rule_id, texts.get(rule_id, [])) for rule_id in told],
    }
    results = [_result(one, told.index(one.rule)) for one in findings]
    return {
        "$schema": SARIF,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _descriptor(rule_id: str, rules: Sequence[Rule]) -> dict[str, Any]:
    help_text = "\n".join(dict.fromkeys(f"{rule.level}: {rule.what}. {rule.remedy}".strip() for rule in rules))
    described = {"fullDescription": {"text": rules[0].what}, "help": {"text": help_text}} if rules else {}
    return {"id": rule_id, **described}


def _result(finding: Finding, index: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": quote(PurePath(finding.part.name).as_posix())}}
    if finding.line is not None:
        place["region"] = {"startLine": finding.part.file_line(finding.line)}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": message(finding)},
        "locations": [{"physicalLocation": place}],
    }
