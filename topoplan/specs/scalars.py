"""Single values as people write them: what a bare word of YAML means, and numbers that were written as text."""

from __future__ import annotations

import math
import re
from typing import Any

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")


def plain_scalar(text: str) -> bool | int | float | str | None:
    """Meaning of an unquoted YAML 1.2 scalar."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text[0] in "tT"
    # A number of a thousand digits is text: int() would refuse it, and no key takes it.
    if len(text) <= 400:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    if match := _INF.fullmatch(text):
        return float(match.group(1) + "inf")
    return float("nan") if text in (".nan", ".NaN", ".NAN") else text


def as_number(value: Any) -> Any:
    """A number that was written as text, such as YAML 1.1's `2e-5`, as a number; anything else as it is."""
    number = plain_scalar(value.strip()) if isinstance(value, str) else value
    # Beyond a float's range every kind of value refuses it; as infinity it overflows nowhere on the way.
    return math.inf if isinstance(number, int) and abs(number) > 10**300 else number
