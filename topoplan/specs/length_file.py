"""A user's length histogram: in the spec, or in a CSV or JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from topoplan.errors import SpecError
from topoplan.specs.json_source import json_value
from topoplan.specs.kinds import Checked
from topoplan.specs.lengths import checked_pair, histogram
from topoplan.specs.source import read_text, shown_path
from topoplan.units import shown

_MAX_FILE_BYTES = 100_000_000
EXPECTED = "expected [tokens, count] pairs, or a mapping of tokens to counts"


def pairs_of(value: Any) -> tuple[tuple[int, int], ...]:
    """Parse a histogram from a list of pairs, a list of lengths (one sample each) or a mapping. Raises SpecError."""
    if isinstance(value, Mapping):
        entries: list[Any] = list(value.items())
    elif isinstance(value, list):
        entries = [item if isinstance(item, list) else [item, 1] for item in value]
    else:
        raise SpecError("is not a length histogram", expected=EXPECTED)
    if not entries:
        raise SpecError("is an empty length histogram", expected=EXPECTED)
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            if len(entry) != 2:
                raise SpecError("is no pair of two numbers", expected=EXPECTED)
            found.append(checked_pair(*entry))
        except SpecError as error:
            raise SpecError(f"entry {number}: {error.what}", expected=error.expected) from None
    return histogram(found)


def _lengths(value: Any) -> tuple[tuple[int, int], ...] | str:
    """Return pairs of tokens and count, or the path of a file."""
    if isinstance(value, str) and value.strip() and value.isprintable():
        return value
    if not isinstance(value, list | Mapping):
        raise SpecError(f"{shown(value)} is not a length histogram", expected=f"{EXPECTED}, or a file of either")
    return pairs_of(value)


def _schema() -> dict[str, Any]:
    number = {"type": "integer", "minimum": 1}
    pair = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
    several = {"type": "array", "items": {"anyOf": [number, pair]}, "minItems": 1}
    mapping = {"type": "object", "patternProperties": {"^[0-9]+$": number}, "additionalProperties": False}
    return {"anyOf": [{"type": "string"}, several, mapping | {"minProperties": 1}]}


LENGTHS = Checked(_lengths, _schema)


def read_length_file(path: Path) -> tuple[tuple[int, int], ...]:
    """Read a histogram from a file: CSV with `tokens,count` per line, or JSON as in the spec. Raises SpecError."""
    name = shown_path(path)
    text = read_text(path, most_bytes=_MAX_FILE_BYTES, wanted="give fewer lengths, with their counts")
    if text.lstrip()[:1] not in ("[", "{"):
        return histogram(_of_csv(text, name))
    try:
        return pairs_of(json_value(text, name=name))
    except SpecError as error:
        raise SpecError(error.what, where=error.where or name, expected=error.expected) from None


def _of_csv(text: str, name: str) -> Iterator[tuple[int, int]]:
    found = False
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if not any(cells) or (not found and cells == ["tokens", "count"]):
            continue
        where = f"{name}:{number}"
        if len(cells) != 2:
            raise SpecError(f"has {len(cells)} values", where=where, expected="expected `tokens,count` on a line")
        try:
            yield checked_pair(*cells)
        except SpecError as error:
            raise SpecError(error.what, where=where, expected=error.expected) from None
        found = True
    if not found:
        raise SpecError("is empty", where=name, expected="expected `tokens,count` on a line")
