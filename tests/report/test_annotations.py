"""Findings in the formats of other programs."""

import json
from dataclasses import replace

from topoplan.reading.finding import Finding
from topoplan.reading.parts import Part
from topoplan.report.annotations import github_lines, sarif

PART = Part(kind="shell", name="runs/a b,c.sh", text="one\ntwo\n", lines=(7, 8))
FINDING = Finding(
    rule="launch-nested-torchrun", severity="error", part=PART, line=2, what="100% wrong: twice", why="so", remedy="do"
)
NOTE = replace(FINDING, rule="plan-slower", severity="note", line=None, why="", remedy="")


def test_github_shows_a_finding_at_its_line() -> None:
    assert list(github_lines([FINDING, NOTE])) == [
        "::error file=runs/a b%2Cc.sh,line=8,title=launch-nested-torchrun::100%25 wrong: twice%0Aso%0Aremedy: do",
        "::notice file=runs/a b%2Cc.sh,title=plan-slower::100%25 wrong: twice",
    ]


def test_sarif_has_each_rule_once_with_its_help_and_each_finding_with_its_place() -> None:
    (run,) = json.loads(json.dumps(sarif([FINDING, replace(FINDING, line=1), NOTE])))["runs"]

    rules = run["tool"]["driver"]["rules"]
    assert [one["id"] for one in rules] == ["launch-nested-torchrun", "plan-slower"]
    assert all(one["help"]["text"] for one in rules)
    assert [(one["ruleId"], one["ruleIndex"], one["level"]) for one in run["results"]] == [
        *[("launch-nested-torchrun", 0, "error")] * 2,
        ("plan-slower", 1, "note"),
    ]
    first, _, last = (one["locations"][0]["physicalLocation"] for one in run["results"])
    assert first == {"artifactLocation": {"uri": "runs/a%20b%2Cc.sh"}, "region": {"startLine": 8}}
    assert "region" not in last
