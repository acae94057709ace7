"""Single values as people write them: what a bare word of YAML means, and numbers that were written as text."""

from __future__ import annotations

import math
import re
from typing import Any

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
NOT_DECIMAL = re.compile(r"[-+]?0(?:[0-9_]+|[oO][0-7_]+|[xX][0-9a-fA-F_]+|[bB][01_]+)")
"""Numbers that YAML 1.1 and 1.2 read differently: 010 is 8 in the one and 10 in the other. Here they are text."""
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")


def plain_scalar(text: str) -> bool | int | float | str | None:
    """Meaning of an unquoted YAML 1.2 scalar."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text[0] in "tT"
    # A number of a thousand digits is text: int() would refuse it, and no key takes it.
    if len(text) <= 400 and not NOT_DECIMAL.fullmatch(text):
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


def as_whole(value: Any) -> Any:
    """`4.0` and `1e5` as whole numbers."""
    number = as_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def as_fraction(value: Any) -> Any:
    """`70%` as a number."""
    if not (isinstance(value, str) and value.strip().endswith("%")):
        return as_number(value)
    number = as_number(value.strip()[:-1])
    return number / 100 if isinstance(number, int | float) else number


def as_switch(value: Any) -> Any:
    """A word of YAML 1.1 as true or false."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value
