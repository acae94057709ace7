"""OmegaConf references `${a.b}` to keys that a file does not contain."""

from __future__ import annotations

import re
from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.rules import Rule
from topoplan.reading.setup import Configuration
from topoplan.reading.values import texts
from topoplan.specs.source import at, path_of
from topoplan.units import quote

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def undefined(configuration: Configuration, rule: Rule) -> Iterator[Finding]:
    """Report references to missing keys, except in a file composed of several (Hydra's `defaults:`)."""
    data = configuration.source.data
    if "defaults" in data or configuration.part.is_excerpt:
        return
    for path, text in texts(data):
        for name in _REFERENCE.findall(text):
            *block, key = path_of(name)
            held = at(data, tuple(block))
            if not isinstance(held, dict) or key not in held:
                yield rule.at(configuration, path, name=quote(name))
