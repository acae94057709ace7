"""OmegaConf interpolation of `${a.b}` and `${oc.env:NAME,default}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from topoplan.specs.source import at, path_of, plain_scalar

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MOST_STEPS = 100


def filled(value: Any, data: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    """Return a document's value with interpolations resolved; None if one of them is unknown.

    `variables` are environment variables.
    """
    if not isinstance(value, str) or "${" not in value:
        return value
    for _ in range(_MOST_STEPS):
        match = _INNERMOST.search(value)
        if match is None:
            return plain_scalar(value.strip()) if "$" not in value else None
        found = _meant(match[1], data, variables)
        if found is None or (isinstance(found, Mapping | list) and match[0] != value):
            return None
        if match[0] == value and not isinstance(found, str):
            return found
        value = value.replace(match[0], str(found))
    return None


def _meant(words: str, data: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    resolver, colon, rest = words.partition(":")
    if not colon:
        return at(data, path_of(words.strip()))
    if resolver == "oc.env":
        name, comma, default = rest.partition(",")
        return variables.get(name.strip(), default if comma else None)
    return rest if resolver == "oc.decode" else None
