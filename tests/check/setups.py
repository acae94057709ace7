"""Setups from texts, and what one rule module says about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from topoplan.check.finding import Finding
from topoplan.check.read_setup import read_setup
from topoplan.check.setup import Setup


def setup_of(text: str, *, name: str = "run.sh", **others: str) -> Setup:
    """The setup of one file; `others` lie beside it: `a_yaml="stage: sft"` is a.yaml."""
    with TemporaryDirectory() as directory:
        for other, content in others.items():
            (Path(directory) / other.replace("_", ".")).write_text(content, encoding="utf-8")
        path = Path(directory) / name
        path.write_bytes(text.encode())
        return read_setup([str(path)])


def rules_of(findings: Callable[[Setup], Iterator[Finding]], setup: Setup) -> dict[str, Finding]:
    """The findings by rule; each rule at most once."""
    found = list(findings(setup))
    by_rule = {finding.rule: finding for finding in found}
    assert len(by_rule) == len(found), [finding.rule for finding in found]
    return by_rule


def fixed(finding: Finding) -> str:
    """The text of the part with the edits of a finding made."""
    lines = finding.part.text.split("\n")
    assert finding.edits
    for edit in sorted(finding.edits, key=lambda one: one.first_line, reverse=True):
        lines[edit.first_line - 1 : edit.last_line] = edit.text.split("\n") if edit.text else []
    return "\n".join(lines)
