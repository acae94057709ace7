"""Read a JSON file and keep the line of every key.

The YAML reader is not suitable for JSON that must round-trip exactly: it does not join surrogate pairs, folds some
Unicode line breaks, and refuses tabs between tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from topoplan.errors import SpecError
from topoplan.specs.source import KeyPath, Source
from topoplan.units import shown

_MAX_DEPTH = 60
"""Depth limit: deeper values would exceed the recursion limit of the code that reads them."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+|\n')


def json_value(text: str, *, name: str, remedy: str = "", parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON text. Raises SpecError with `name` and the line."""
    try:
        return json.loads(text, parse_constant=parse_constant)
    except json.JSONDecodeError as error:
        raise SpecError(f"is not JSON: {error.msg}", where=f"{name}:{error.lineno}", remedy=remedy) from None
    except RecursionError:
        raise SpecError("is not JSON that can be read: nested too deep", where=name) from None
    except ValueError as error:  # a refused constant, or a number of thousands of digits
        raise SpecError(f"is not JSON that can be read: {error}", where=name) from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def parse_json(text: str, *, name: str, remedy: str = "") -> Source:
    """Parse the JSON object in `text`. Raises SpecError with `name` and the line; `remedy` is for text without one."""
    value = json_value(text, name=name, remedy=remedy, parse_constant=_refuse)
    try:
        # A lone surrogate is not a character: text with one cannot be written to a file.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise SpecError("holds half a character (a lone surrogate)", where=name) from None
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "one value"
        raise SpecError(f"holds {what}", where=name, expected="expected a JSON object", remedy=remedy)
    return Source(name=name, data=value, lines=_lines(text, name))


def _lines(text: str, name: str) -> dict[KeyPath, int]:
    """Return the line of each key and list item of valid JSON. Raises SpecError for a duplicate key."""
    lines: dict[KeyPath, int] = {}
    path: list[str | int] = []  # path of the next token, ending in the current list index or the latest key
    is_key = False
    line = 1
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "\n":
            line += 1
        elif token in "}]":
            path.pop()
            is_key = False
        elif token == ",":
            last = path[-1]
            is_key = isinstance(last, str)
            path[-1] = last if isinstance(last, str) else last + 1
        elif token == ":":
            is_key = False
        elif is_key:
            path[-1] = json.loads(token)
            key_path = tuple(path)
            if key_path in lines:
                raise SpecError(
                    f"key {shown(path[-1])} is given twice; first on line {lines[key_path]}",
                    where=f"{name}:{line}",
                    remedy="keep one of them",
                )
            lines[key_path] = line
        else:
            if path and isinstance(path[-1], int):
                lines[tuple(path)] = line
            if token in "{[":
                if len(path) == _MAX_DEPTH:
                    raise SpecError(f"is nested more than {_MAX_DEPTH} levels deep", where=f"{name}:{line}")
                path.append("" if token == "{" else 0)
                is_key = token == "{"
    return lines
