from pathlib import Path

import pytest

from tests.reading.setups import configuration, fixed, launch
from topoplan.reading.rules import Rule, read_rules
from topoplan.reading.setup import Option, Variable

TABLE = """
reads = "keys of a trainer"
source = "args.py"

[seed]
level = "warning"
what = "{key} is {value:g}, and {{x}} stays"
why = "chance"
fix.drop = true

[seed.large]
level = "error"
what = "{key} is too large"
source = "other.py"
fix = { name = "random_seed", value = 1 }

[seed.alone]
level = "note"
what = "there is no seed"
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Rule]:
    (tmp_path / "a_wing").mkdir()
    (tmp_path / "a_wing" / "__init__.py").touch()
    (tmp_path / "a_wing" / "rules.toml").write_text(TABLE)
    monkeypatch.syspath_prepend(tmp_path)
    return dict(read_rules("a_wing", "rules.toml"))


def test_a_table_says_each_text_of_a_rule_and_what_they_share_once(rules: dict[str, Rule]) -> None:
    assert [(name, one.id, one.reads, one.source) for name, one in rules.items()] == [
        ("seed", "seed", "keys of a trainer", "args.py"),
        ("seed.large", "seed", "keys of a trainer", "other.py"),
        ("seed.alone", "seed", "keys of a trainer", "args.py"),
    ]


def test_a_finding_is_filled_in_at_its_key_and_corrected_as_the_table_has_it(rules: dict[str, Rule]) -> None:
    file = configuration("stage: sft\nseed: 7\n")
    finding = rules["seed"].at(file, "seed", value=7.0)
    assert (finding.rule, finding.severity, finding.line) == ("seed", "warning", 2)
    assert (finding.what, finding.why, finding.remedy) == ("seed is 7, and {x} stays", "chance", "")
    assert fixed(finding) == "stage: sft\n"
    assert fixed(rules["seed.large"].at(file, ("seed",))) == "stage: sft\nrandom_seed: 1\n"
    assert rules["seed.alone"].at(file, "seed").edits == ()


def test_what_is_given_takes_the_place_of_the_tables_own(rules: dict[str, Rule]) -> None:
    file = configuration("seed: 7\n")
    finding = rules["seed"].at(file, None, level="note", what="none", why="so", remedy="do", edits=())
    assert (finding.severity, finding.line, finding.what) == ("note", None, "none")
    assert (finding.why, finding.remedy, finding.edits) == ("so", "do", ())


def test_a_launch_is_told_at_what_decides_it_where_that_stands_beside_it(rules: dict[str, Rule]) -> None:
    command, other = launch(), launch(name="other.sh")
    rule = rules["seed.alone"]
    assert rule.on(command).line == command.first_line == 3
    assert rule.on(command, 2).line == 2
    assert rule.on(command, Option(value="1", line=2)).line == 2
    assert rule.on(command, Variable(name="A", value="1", part=command.part, line=1)).line == 1
    assert rule.on(command, Variable(name="A", value="1", part=other.part, line=1)).line == 3
