"""Text of others (hosts, their programs, files of strangers) as text that a terminal shows and does not obey.

It is made safe where it comes in, so that whatever is printed of it later is: `HostError` does so with its words,
`hosts.collect` and `hosts.preflight.connections` with what hosts say of themselves, `run.shown` with the output of
jobs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

_Value = TypeVar("_Value")

_CONTROL, _STRING = r"[0-?]*[ -/]*[@-~]", r"[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
_ESCAPE = re.compile(rf"\x1b(?:\[{_CONTROL}|[\]PX^_]{_STRING}|[@-Z\\-_])")
_C1 = re.compile(rf"\x9b{_CONTROL}|[\x90\x98\x9d-\x9f]{_STRING}")
"""ECMA-48: control sequences (colours, cursor), strings up to their end (titles, links, the clipboard) and escapes of
two characters, with ESC and as C1. What begins with ESC is found fast."""


def plain(text: str) -> str:
    """`text` on one line, with nothing in it that a terminal obeys.

    Sequences are taken out, tabs become spaces, and every other character that is not printed (`\\r`, a backspace, a
    bidirectional override) is escaped as in Python.
    """
    return text if text.isprintable() else _escaped(_without_sequences(text))


def plain_lines(text: str) -> str:
    """`plain` of each line, of many at once: lines of their own are made only where sequences are not all there is."""
    if text.replace("\n", "").isprintable():
        return text
    text = _without_sequences(text)
    return text if text.replace("\n", "").isprintable() else "\n".join(map(_escaped, text.split("\n")))


def plain_values(value: _Value) -> _Value:
    """The same value (of JSON, or a dataclass), with all text in it plain."""
    return with_text(value, plain)


def with_text(value: _Value, change: Callable[[str], str]) -> _Value:
    """The same value (of JSON, or a dataclass), with each text in it changed."""
    found: Any = value
    if isinstance(value, str):
        found = change(value)
    elif is_dataclass(value) and not isinstance(value, type):
        found = replace(value, **{one.name: with_text(getattr(value, one.name), change) for one in fields(value)})
    elif isinstance(value, Mapping):
        found = {with_text(key, change): with_text(item, change) for key, item in value.items()}
    elif isinstance(value, list | tuple | frozenset):
        found = type(value)(with_text(item, change) for item in value)
    return found  # type: ignore[no-any-return]


def _without_sequences(text: str) -> str:
    text = _ESCAPE.sub("", text)
    return text if text.isascii() else _C1.sub("", text)


class _Escapes(dict[int, str]):
    """What each character is shown as, by its number; known once it has come."""

    def __missing__(self, number: int) -> str:
        one = chr(number)
        self[number] = shown = one if one.isprintable() else one.encode("unicode_escape").decode()
        return shown


_ESCAPES = _Escapes()


def _escaped(text: str) -> str:
    """A line without its tabs and, as Python writes them, what is not printed."""
    text = text.expandtabs()
    if text.isprintable():
        return text
    return text.translate(_ESCAPES)
