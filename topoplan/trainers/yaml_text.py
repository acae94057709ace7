"""YAML text with comments that YAML 1.1, YAML 1.2 and OmegaConf (LLaMA-Factory's parser) read identically."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from topoplan.specs.scalars import scalar

_COMMENT_COLUMN = 52
_WIDTH = 116


class Entry(NamedTuple):
    """One line of a YAML mapping."""

    key: str
    value: Any = None
    comment: str = ""
    """Why the line is there; empty if the key is self-explanatory."""
    entries: tuple[Entry, ...] = ()
    """Lines of a mapping under the key, instead of `value`."""


class Section(NamedTuple):
    """Related lines under a heading."""

    title: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    """Comment lines below the entries: what was left out, and why."""


def mapping_text(head: Iterable[str], sections: Iterable[Section]) -> str:
    """Return the whole file: `head` as comment lines, then the non-empty sections."""
    blocks = ["\n".join(_comment_line(line) for line in head)]
    for section in sections:
        if not section.entries and not section.notes:
            continue
        lines = [_comment_line(section.title)]
        lines += [_entry_line(entry) for entry in section.entries]
        lines += [_comment_line(note) for note in section.notes]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def one_line(text: str) -> str:
    """Return `text` for use in a comment: on one line, with only printable characters."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())


def spec_line(key: str, value: object, comment: str = "") -> str:
    """Return one line of a spec; `value` is in YAML notation, and rates are unquoted, as people write them."""
    line = f"{key}: {value}"
    return f"{line:<31} # {one_line(comment)}" if comment else line


def _entry_line(entry: Entry, indent: str = "") -> str:
    line = f"{indent}{entry.key}: {scalar(entry.value)}" if not entry.entries else f"{indent}{entry.key}:"
    below = "".join(f"\n{_entry_line(inner, indent + '  ')}" for inner in entry.entries)
    if not entry.comment:
        return line + below
    beside = f"{line:<{_COMMENT_COLUMN}}  # {one_line(entry.comment)}"
    return (beside if len(beside) <= _WIDTH else f"{indent}{_comment_line(entry.comment)}\n{line}") + below


def _comment_line(text: str) -> str:
    return f"# {one_line(text)}".rstrip()
