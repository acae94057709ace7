"""Layout rules and the keys that decide them."""

from __future__ import annotations

from tests.reading.setups import configuration
from topoplan.engines.megatron.rules import RULES_OF_A_GIVEN_LAYOUT
from topoplan.trainers.layout_keys import KEYS_OF_RULE, key_line
from topoplan.trainers.megatron_keys import PP, TP


def test_every_layout_rule_has_its_keys() -> None:
    assert {rule.name for rule in RULES_OF_A_GIVEN_LAYOUT} <= KEYS_OF_RULE.keys()


def test_the_line_is_that_of_the_first_key_that_is_there() -> None:
    one = configuration(f"stage: sft\n{PP}: 2\n")
    assert key_line(one, (TP, PP)) == 2
    assert key_line(one, (TP,)) is None
