"""Properties of all rules of `topoplan check` together."""

import json
import re
from importlib.resources import files
from string import Formatter

from topoplan.lint.rules.registry import all_rules


def test_every_text_can_be_filled_in() -> None:
    for rule in all_rules():
        fields = [name for text in (rule.what, rule.why, rule.remedy) for _, name, *_ in Formatter().parse(text)]
        assert rule.what
        assert rule.reads
        assert all(name is None or name.isidentifier() for name in fields), rule.id
        rule.what.format(**dict.fromkeys(filter(None, fields), 1.0))


def test_every_verdict_on_a_variable_can_be_told_and_has_a_source() -> None:
    catalog = json.loads(files("topoplan.catalog").joinpath("environment_variables.json").read_text(encoding="utf-8"))
    cases = [case for cases in catalog["variables"].values() for case in cases]
    for case in [*cases, catalog["debugging"]]:
        re.compile(case.get("pattern", ""))
        assert case["severity"] in ("error", "warning", "note")
        assert case["source"]
        assert "{" not in case["what"].format(name="N", value="V")
        assert case["remedy"]
    assert not set(catalog["debugging"]["names"]) & set(catalog["variables"])
