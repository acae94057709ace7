"""Iterate over the objects in a JSON or JSONL file, which may be larger than memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from topoplan.errors import SpecError
from topoplan.specs.source import shown_path
from topoplan.units import shown

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
