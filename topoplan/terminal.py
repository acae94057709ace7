"""Make untrusted text (from hosts, their programs, other people's files) safe to print on a terminal.

Text is sanitized where it enters the program, so that everything printed later is safe: `HostError` sanitizes its
message, `hosts.collect` and `hosts.preflight.connections` what hosts report, and `run.shown` the output of jobs.
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
"""ECMA-48 control sequences (colors, cursor), strings with their terminators (titles, links, the clipboard) and
two-character escapes, introduced by ESC or a C1 code. ESC has a pattern of its own because it is fast to search for."""


def plain(text: str) -> str:
    """Return `text` on one line, without anything that a terminal would interpret.

    Control sequences are removed, tabs become spaces, and every other non-printable character (`\\r`, a backspace, a
    bidirectional override) is escaped as in Python.
    """
    return text if text.isprintable() else _escaped(_without_sequences(text))


def plain_lines(text: str) -> str:
    """Apply `plain` to each line of a text; splits it into lines only if removing the sequences is not enough."""
    if text.replace("\n", "").isprintable():
        return text
    text = _without_sequences(text)
    return text if text.replace("\n", "").isprintable() else "\n".join(map(_escaped, text.split("\n")))


def plain_values(value: _Value) -> _Value:
    """Return a JSON value or dataclass with `plain` applied to every string in it."""
    return with_text(value, plain)


def with_text(value: _Value, change: Callable[[str], str]) -> _Value:
    """Return a JSON value or dataclass with `change` applied to every string in it."""
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
    """Cache of the printable form of each character, by code point."""

    def __missing__(self, number: int) -> str:
        one = chr(number)
        self[number] = shown = one if one.isprintable() else one.encode("unicode_escape").decode()
        return shown


_ESCAPES = _Escapes()


def _escaped(text: str) -> str:
    """Expand tabs in a line and escape non-printable characters as Python does."""
    text = text.expandtabs()
    if text.isprintable():
        return text
    return text.translate(_ESCAPES)
