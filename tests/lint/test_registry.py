"""All rules of `topoplan check` taken together."""

from __future__ import annotations

from string import Formatter

from topoplan.lint.rules.registry import all_rules


def test_every_text_can_be_filled_in() -> None:
    for rule in all_rules():
        fields = [name for text in (rule.what, rule.why, rule.remedy) for _, name, *_ in Formatter().parse(text)]
        assert rule.what
        assert rule.reads
        assert all(name is None or name.isidentifier() for name in fields), rule.id
        rule.what.format(**dict.fromkeys(filter(None, fields), 1.0))
