"""Every rule of `topoplan check`, tested by cases of input files and expected findings.

`cases/*.yaml` has a section per rule, with cases in which the rule fires and near misses in which it does not:

    swift-warmup-ratio:
    - {finds: {sft: {warmup_ratio: 5}}, level: error}
    - {not: {sft: {warmup_ratio: 0.5}}}

An input maps file names to texts, or bases of `cases/bases.yaml` to changes (`~` removes a key); a bare text is a
script. Next to each case is a valid job, a.yaml, for commands to read. Like it, files in subdirectories are not passed
to `check` themselves. A case must find its rule, as often as `times` says, and the rules in `also`, and no others.
Further keys constrain the first finding: `level`; `at`, part of the text of its line; `says`, part of its message;
`hides`, text that must not occur in it; `fixed`, lines of the corrected file, in which the rule must no longer fire, or
`no` if it has no correction.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tests.tables import LOADER
from topoplan.lint.check import Checked, check, fix
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.lint.rules.registry import all_rules
from topoplan.reading.edits import applied

CASES = Path(__file__).parent / "cases"


class Texts(LOADER):
    """Loads every value as text, exactly as written."""

    yaml_implicit_resolvers: ClassVar = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # only for `<<`


def read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Texts)


BASES = read(CASES / "bases.yaml")
SECTIONS = {
    rule: cases
    for path in sorted(CASES.glob("*.yaml"))
    if path.name != "bases.yaml"
    for rule, cases in read(path).items()
}
IDS = {rule.id for rule in all_rules()}


# Files of a case ------------------------------------------------------------------------------------------------------


def changed(keys: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in keys.items() if changes.get(key) != "~"}
    for key, value in changes.items():
        if value != "~":
            nested = isinstance(value, dict) and isinstance(kept.get(key), dict)
            kept[key] = changed(kept[key], value) if nested else value
    return kept


def lines_of(keys: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in keys.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from lines_of(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value}"


def written(base: dict[str, Any], changes: dict[str, Any]) -> str:
    keys = changed(base["keys"], changes)
    if "command" in base:
        return " \\\n".join([base["command"], *(f"    --{key} {value}" for key, value in keys.items())])
    text = "\n".join(lines_of(keys))
    return json.dumps(yaml.load(text, Loader=LOADER), indent=2) if base["file"].endswith(".json") else text


def files_of(case: dict[str, Any]) -> dict[str, str]:
    given = case["finds"] if "finds" in case else case["not"]
    files: dict[str, str] = {}
    for name, content in ({"run.sh": given} if isinstance(given, str) else given).items():
        if name in BASES:
            base = BASES[name]
            files |= {base["file"]: written(base, content), **base.get("beside", {})}
        else:
            files[name] = content
    return files


def checked_in(case: dict[str, Any], directory: Path, **corrected: str) -> Checked:
    (directory / "a.yaml").write_text(written(BASES["plain"], {}) + "\n")
    paths = []
    for name, text in files_of(case).items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((corrected.get(str(path)) or text.rstrip("\n") + "\n").encode())
        paths += [] if "/" in name else [str(path)]
    return check(paths)


# What --fix may do ----------------------------------------------------------------------------------------------------

ABOUT_KEYS_WITHOUT_EFFECT = {
    *("mca-ignored-key", "mca-freezes-nothing", "mca-sequence-parallel-alone", "mca-sequence-parallel-forced"),
    *("mca-packing-in-dpo", "mca-recompute-contradiction", "mca-additional-twice", "mca-rope-fusion"),
    *("llamafactory-ignored-key", "llamafactory-removed-key", "swift-ignored-argument"),
    *("deepspeed-unknown-key", "deepspeed-activation-checkpointing"),
}
WORDS = {
    "yes": "true",
    "y": "true",
    "on": "true",
    **dict.fromkeys(("no", "n", "off", "none", "null", "~", ""), "false"),
}


def meant(value: Any) -> Any:
    """Return a value as its author meant it, regardless of the type it was parsed as."""
    if isinstance(value, dict):
        return {key: meant(item) for key, item in value.items()}
    word = str(value).strip("\"'“”‘’ ").lower()
    word = re.sub(r"\s*[,、，]\s*", ",", WORDS.get(word, word))
    return float(word.replace("_", "")) if re.fullmatch(r"[-+]?[\d_]*\.?\d+(e[-+]?\d+)?", word) else word


def assert_trains_the_same(checked: Checked) -> None:
    corrected = fix(checked, PredictionTarget())
    done = [finding for copy in corrected.copies for one in copy.corrections for finding in one.findings]
    if not done or {one.rule for one in done} & ABOUT_KEYS_WITHOUT_EFFECT:
        return
    places = {(one.part.name, one.from_command): one for one in checked.setup.configurations}
    for after in corrected.after.setup.configurations:
        before = places.get((after.part.name, after.from_command))
        old, new = before.source.data if before else {}, after.source.data if before else {}
        lost = [meant(value) for key, value in old.items() if key not in new]
        gained = [meant(value) for key, value in new.items() if key not in old]
        assert lost in (gained, [meant(new.get("eval_strategy"))]) or any(one.rule.startswith("shell-") for one in done)
        assert {key: meant(old[key]) for key in old.keys() & new} == {key: meant(new[key]) for key in old.keys() & new}


# The cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        pytest.param(rule, case, id=f"{rule}-{number}")
        for rule, cases in SECTIONS.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_case_finds_its_rule_and_nothing_else(rule: str, case: dict[str, Any], tmp_path: Path) -> None:
    checked = checked_in(case, tmp_path)
    assert_trains_the_same(checked)
    found = checked.findings
    expected = {rule, *case.get("also", ())} if "finds" in case else {*case.get("also", ())}
    assert {one.rule for one in found} == expected
    if "finds" not in case:
        return
    own = [one for one in found if one.rule == rule]
    first = own[0]
    assert len(own) == int(case.get("times", len(own)))
    assert first.severity == case.get("level", first.severity)
    assert "hides" not in case or case["hides"] not in repr((first.what, first.why, first.remedy, first.edits))
    assert case.get("says", "") in f"{first.what}; {first.why}; {first.remedy}"
    if "at" in case:
        assert case["at"] in first.part.text.splitlines()[(first.line or 0) - 1]
    if case.get("fixed") == "no":
        assert not first.edits
    elif "fixed" in case:
        text = applied(first.part.text, first.edits)
        assert f"\n{case['fixed'].rstrip()}\n" in f"\n{text}"
        assert rule not in {one.rule for one in checked_in(case, tmp_path, **{first.part.name: text}).findings}


def test_every_rule_has_a_case_and_a_near_miss() -> None:
    assert SECTIONS.keys() == IDS
    assert [rule for rule, cases in SECTIONS.items() if not any("finds" in case for case in cases)] == []
    assert [rule for rule, cases in SECTIONS.items() if not any("not" in case for case in cases)] == []
