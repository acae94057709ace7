"""The texts of the rules on ms-swift."""

from __future__ import annotations

from topoplan.reading.rules import read_rules

RULES = {**read_rules(__package__, "launch.toml"), **read_rules(__package__, "swift.toml")}
