"""The texts of the rules on LLaMA-Factory."""

from __future__ import annotations

from topoplan.reading.rules import read_rules

_TABLES = ("yaml_values.toml", "launch.toml", "llamafactory.toml", "megatron_bridge.toml", "mca.toml")

RULES = {name: rule for table in _TABLES for name, rule in read_rules(__package__, table).items()}
