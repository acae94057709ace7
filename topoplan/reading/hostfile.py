"""Host files of `deepspeed --hostfile` and `mpirun --hostfile`: one host a line, with the number of its GPUs.

Source: DeepSpeed 0.19 `launcher/runner.py`, `_parse_hostfile`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from topoplan.reading.parts import Part

_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)")
_LIKELY = re.compile(r"[\w.@-]+\s+slots\s*=\s*\d+\s*(?:max[_-]slots\s*=\s*\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostfile:
    """The hosts of a file, and the lines that DeepSpeed refuses."""

    part: Part
    slots: Mapping[str, int]
    """Host -> number of GPUs."""
    lines: Mapping[str, int]
    """Host -> its first line."""
    twice: tuple[tuple[int, str], ...]
    """Lines with a host that another line has already."""
    unread: tuple[tuple[int, str], ...]
    """Lines of another form."""


def is_hostfile(text: str) -> bool:
    """Whether a text without a telling suffix is a list of hosts."""
    lines = [line for _, line in _content(text)]
    likely = sum(_LIKELY.fullmatch(line) is not None for line in lines)
    return likely > 0 and all(len(line.split()) <= 3 for line in lines) and 2 * likely >= len(lines)


def hostfile_of(part: Part) -> Hostfile:
    """Read the hosts of a part."""
    slots: dict[str, int] = {}
    lines: dict[str, int] = {}
    twice, unread = [], []
    for number, line in _content(part.text):
        if (entry := _ENTRY.match(line)) is None:
            unread.append((number, line))
        elif entry[1] in slots:
            twice.append((number, entry[1]))
        else:
            slots[entry[1]], lines[entry[1]] = int(entry[2][:6]), number
    return Hostfile(part=part, slots=slots, lines=lines, twice=tuple(twice), unread=tuple(unread))


def _content(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped
