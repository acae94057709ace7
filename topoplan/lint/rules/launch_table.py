"""The texts of the rules on launches that hold for every trainer."""

from __future__ import annotations

from topoplan.reading.rules import read_rules

RULES = read_rules(__package__, "launch.toml")
