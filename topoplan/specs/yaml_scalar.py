"""Write a value as YAML text that YAML 1.1, YAML 1.2 and OmegaConf read alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml

# Text stays unquoted only if every reader takes it for a string: it starts with a letter, `/` or `./`, or is a
# quantity with its unit (`900GB/s`), holds no YAML syntax, and is none of the words below.
_PLAIN_STRING = re.compile(r"(?:[A-Za-z_]|\.?/)[A-Za-z0-9_./+-]*|\d+(?:\.\d+)?(?:[kMGTP]i?[Bb](?:/s)?|us|ms)")
_YAML_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"])


def scalar(value: Any) -> str:
    """Return `value` as YAML text; mappings and lists in flow style."""
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
