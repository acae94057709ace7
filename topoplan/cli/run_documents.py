"""Read run documents, each with a cluster, a model, a job and a layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topoplan.errors import SpecError
from topoplan.specs.source import decoded, parse_source, read_text

_MOST_BYTES = 256 * 2**20
_WANTED = "give a .jsonl, .yaml or .json file, in parts where it is large"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """One run document, or why it is invalid."""

    id: Any = None
    where: str
    """File and line, for messages."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def read_run_documents(source: str) -> Iterator[RunDocument]:
    """Yield the documents in a .jsonl, .json or .yaml file, or on standard input if `source` is `-`."""
    text, where = source_text(source)
    suffix = "" if source == "-" else Path(source).suffix.lower()
    if not text.strip():
        raise SpecError("nothing in it", where=where, expected="expected at least one run document")
    if suffix in (".yaml", ".yml"):
        yield _document(parse_source(text, name=where).data, where)
    elif suffix == ".jsonl" or (suffix != ".json" and _looks_like_lines(text)):
        yield from _lines(text, where)
    elif text.lstrip()[0] in "{[":
        yield _from_json(text, where)
    else:
        yield _document(parse_source(text, name=where).data, where)


def source_text(source: str) -> tuple[str, str]:
    """Return the text of a file, or of standard input if `source` is `-`, and its name for messages."""
    if source != "-":
        return read_text(Path(source), most_bytes=_MOST_BYTES, wanted=_WANTED), source
    content, name = sys.stdin.buffer.read(_MOST_BYTES + 1), "standard input"
    return decoded(content, name=name, most_bytes=_MOST_BYTES, wanted=_WANTED), name


def _lines(text: str, where: str) -> Iterator[RunDocument]:
    # Not splitlines(): JSON strings may contain U+2028 and other separators, which do not end lines in JSON Lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _from_json(line, f"{where}:{number}")


def _looks_like_lines(text: str) -> bool:
    """Return whether text without a telling suffix is JSON Lines: a line is an object, and the whole is not JSON."""
    lines = text.strip().split("\n")
    if len(lines) == 1 or not any(line.strip().startswith("{") and line.strip().endswith("}") for line in lines):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return lines[0].lstrip().startswith("{")
    return False


def _from_json(text: str, where: str) -> RunDocument:
    try:
        value = json.loads(text)
    except RecursionError:
        return RunDocument(where=where, error=f"{where}: not JSON that can be read: nested too deeply")
    except ValueError as error:
        detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return RunDocument(where=where, error=f"{where}: not JSON: {detail}")
    return _document(value, where)


def _document(value: Any, where: str) -> RunDocument:
    if not isinstance(value, Mapping):
        return RunDocument(where=where, error=f"{where}: a run document is a mapping, this is {_kind(value)}")
    layout = value.get("layout")
    if not isinstance(layout, Mapping):
        problem = "no `layout`" if layout is None else f"`layout` is {_kind(layout)}"
        error = f"{where}: {problem}; expected a mapping such as {{tp: 4, pp: 1, micro_batch_size: 1}}"
        return RunDocument(id=_plain_id(value.get("id")), where=where, error=error)
    spec = {key: item for key, item in value.items() if key not in ("id", "layout")}
    return RunDocument(id=_plain_id(value.get("id")), where=where, spec=spec, layout=layout)


def _plain_id(value: Any) -> Any:
    """Return an id that JSON can represent: YAML also has dates and other types."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    return "a list" if isinstance(value, list) else f"{value!r:.40}"
