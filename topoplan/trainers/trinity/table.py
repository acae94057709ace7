"""What the rules on Trinity-RFT say."""

from __future__ import annotations

from topoplan.reading.rules import read_rules

RULES = read_rules(__package__, "rules.toml")
