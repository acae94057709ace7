"""Read a JSON file: whole, with the line of every key, or record by record, if it may be larger than memory.

The YAML reader is not suitable for JSON that must round-trip exactly: it does not join surrogate pairs, folds some
Unicode line breaks, and refuses tabs between tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from topoplan.errors import SpecError
from topoplan.specs.source import KeyPath, Source, shown_path
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


_CHUNK = 1 << 20
MAX_RECORD_BYTES = 1 << 26
_SPACE = re.compile(r"\s*")
_EXPECTED = "expected a JSON list of objects, or one JSON object a line"


def json_records(path: Path, *, stride: int = 1) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line, object) for every record; with `stride` k, only every k-th object is parsed, and the rest are None.

    A file that starts with `[` is one list; otherwise every line is an object. Raises SpecError with file and line.
    """
    name = shown_path(path)
    try:
        with path.open("rb") as file:
            start = file.read(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if not start:
            raise SpecError("is empty", where=name, expected=_EXPECTED)
        if start == b"[":
            with path.open(encoding="utf-8-sig") as text:
                yield from _of_list(text, name, stride)
        else:
            with path.open("rb") as lines:
                yield from _of_lines(lines, name, stride)
    except UnicodeDecodeError:
        raise SpecError("is not text in UTF-8", where=name, expected=_EXPECTED) from None
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror or error}", where=name) from None


def _of_lines(file: IO[bytes], name: str, stride: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    number, index = 0, 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        where = f"{name}:{number}"
        if len(line) > MAX_RECORD_BYTES:
            raise SpecError(f"a line of more than {MAX_RECORD_BYTES >> 20} MiB", where=where, expected=_EXPECTED)
        if line.isspace():
            continue
        if index % stride:
            yield number, None
        else:
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise SpecError("is not text in UTF-8", where=where, expected=_EXPECTED) from None
            except (ValueError, RecursionError) as error:
                raise SpecError(f"is not JSON: {_reason(error)}", where=where, expected=_EXPECTED) from None
            yield number, _object(value, where)
        index += 1


def _of_list(file: IO[str], name: str, stride: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    decode = json.JSONDecoder().raw_decode
    text, line, counted, position, index = file.read(_CHUNK), 1, 0, 0, 0
    wanted = "["
    while True:
        space = _SPACE.match(text, position)
        position = space.end() if space else position
        if position == len(text):
            line += text.count("\n", counted)
            text, counted, position = file.read(_CHUNK), 0, 0
            if not text:
                raise SpecError("ends in the middle of its list", where=f"{name}:{line}", expected=_EXPECTED)
            continue
        line += text.count("\n", counted, position)
        counted = position
        where = f"{name}:{line}"
        here = text[position]
        if here == "]" and wanted in (",", "first"):
            return
        if wanted in ("[", ","):
            if here != wanted:
                raise SpecError(f"is not JSON: {shown(here)} in place of a comma", where=where, expected=_EXPECTED)
            wanted, position = "first" if wanted == "[" else "value", position + 1
            continue
        try:
            value, end = decode(text, position)
        except (ValueError, RecursionError) as error:
            more = file.read(max(_CHUNK, len(text))) if _may_be_cut(error, text, position) else ""
            if not more:
                raise SpecError(f"is not JSON: {_reason(error)}", where=where, expected=_EXPECTED) from None
            text, counted, position = text[position:] + more, 0, 0
            continue
        yield line, None if index % stride else _object(value, where)
        wanted, position, index = ",", end, index + 1


def _may_be_cut(error: Exception, text: str, position: int) -> bool:
    """Return whether a parse error may be due to a value that continues past the text read so far."""
    if not isinstance(error, json.JSONDecodeError) or len(text) - position > MAX_RECORD_BYTES:
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - 16


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg.removesuffix(" at")
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(f"{shown(value)} is not an object", where=where, expected=_EXPECTED)
    return value
