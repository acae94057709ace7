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

_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[@-Z\\-_]"
)
"""ECMA-48: control sequences (colours, cursor), strings up to their end (titles, links, the clipboard) and escapes of
two characters, with ESC and as C1."""


def plain(text: str) -> str:
    """`text` on one line, with nothing in it that a terminal obeys.

    Sequences are taken out, tabs become spaces, and every other character that is not printed (`\\r`, a backspace, a
    bidirectional override) is escaped as in Python.
    """
    if text.isprintable():
        return text
    text = _SEQUENCE.sub("", text).expandtabs()
    return text if text.isprintable() else "".join(one if one.isprintable() else _escaped(one) for one in text)


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


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
