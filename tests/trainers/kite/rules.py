"""Rules on Kite's files."""

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Setup
from topoplan.reading.values import whole

RULES = read_rules(__package__, "rules.toml")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of Kite's configurations."""
    for configuration in setup.of("kite"):
        loud = whole(configuration, "kite_hum", 2)
        if loud is not None and loud > 2:
            yield RULES["kite-hum"].at(configuration, "kite_hum", value=loud)
