"""Values of a Trinity-RFT configuration with what the environment puts into them."""

from __future__ import annotations

import re

from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_whole, at
from topoplan.specs.source import KeyPath, plain_scalar

_ENVIRONMENT = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,(?P<default>[^{}]*))?\}")
_DECODED = re.compile(r"\$\{oc\.decode:(?P<inner>[^{}]*)\}")


def filled(setup: Setup, configuration: Configuration, path: KeyPath) -> object:
    """A value with `${oc.env:NAME,default}` filled in from what the scripts set; None where that is not known."""
    value = at(configuration.source.data, path)
    if not isinstance(value, str) or "${" not in value:
        return value
    variables = {variable.name: variable.value for variable in setup.variables}

    def fill(found: re.Match[str]) -> str:
        given = variables.get(found["name"], found["default"])
        return found[0] if given is None else given

    text = _DECODED.sub(lambda found: found["inner"], _ENVIRONMENT.sub(fill, value))
    return None if "$" in text else plain_scalar(text.strip())


def filled_count(setup: Setup, configuration: Configuration, path: KeyPath, default: int | None = None) -> int | None:
    """The same where it is a whole number; `default` where nothing is written, None for what is not known."""
    if at(configuration.source.data, path) is None:
        return default
    return as_whole(filled(setup, configuration, path))
