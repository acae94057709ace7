"""Single values as people write them (YAML's unquoted words, numbers written as text), and values as YAML text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
NOT_DECIMAL = re.compile(r"[-+]?0(?:[0-9_]+|[oO][0-7_]+|[xX][0-9a-fA-F_]+|[bB][01_]+)")
"""Numbers that YAML 1.1 and 1.2 read differently (010 is 8 in one and 10 in the other). They stay text here."""
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")


def plain_scalar(text: str) -> bool | int | float | str | None:
    """Return the meaning of an unquoted YAML 1.2 scalar."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text[0] in "tT"
    # A number with a thousand digits stays text: int() would refuse it, and no key accepts it.
    if len(text) <= 400 and not NOT_DECIMAL.fullmatch(text):
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    if match := _INF.fullmatch(text):
        return float(match.group(1) + "inf")
    return float("nan") if text in (".nan", ".NaN", ".NAN") else text


def as_number(value: Any) -> Any:
    """Convert a number written as text, such as YAML 1.1's `2e-5`; return anything else unchanged."""
    number = plain_scalar(value.strip()) if isinstance(value, str) else value
    # Every kind of value refuses a number beyond a float's range; infinity cannot overflow on the way there.
    return math.inf if isinstance(number, int) and abs(number) > 10**300 else number


def as_whole(value: Any) -> Any:
    """Convert whole numbers such as `4.0` and `1e5` to int."""
    number = as_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def as_fraction(value: Any) -> Any:
    """Convert a percentage such as `70%` to a fraction."""
    if not (isinstance(value, str) and value.strip().endswith("%")):
        return as_number(value)
    number = as_number(value.strip()[:-1])
    return number / 100 if isinstance(number, int | float) else number


def as_switch(value: Any) -> Any:
    """Convert a YAML 1.1 boolean word to a boolean."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


# Text stays unquoted only if every reader takes it for a string: it starts with a letter, `/` or `./`, or is a
# quantity with its unit (`900GB/s`), holds no YAML syntax, and is none of the words below.
_PLAIN_STRING = re.compile(r"(?:[A-Za-z_]|\.?/)[A-Za-z0-9_./+-]*|\d+(?:\.\d+)?(?:[kMGTP]i?[Bb](?:/s)?|us|ms)")
_YAML_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"])


def scalar(value: Any) -> str:
    """Return `value` as text that YAML 1.1, YAML 1.2 and OmegaConf read alike; mappings and lists in flow style."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if _PLAIN_STRING.fullmatch(value) and value.lower() not in _YAML_WORDS:
            return value
        return _dumped(value, style='"')
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _dumped(value)  # PyYAML writes 2e-05 as 2.0e-05, which YAML 1.1 needs to see a number
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(str(key))}: {scalar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(scalar(item) for item in value) + "]"
    raise TypeError(f"no YAML form for {type(value).__name__}")


@lru_cache(maxsize=1 << 10, typed=True)
def _dumped(value: Any, style: str | None = None) -> str:
    text: str = yaml.safe_dump(value, default_style=style, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
