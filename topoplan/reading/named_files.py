"""Lookup of files that other files name by a relative path, from wherever that path may start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from topoplan.errors import nearest_file_name
from topoplan.reading.parts import Part
from topoplan.reading.words import is_open
from topoplan.specs.source import below, is_there

_STANDARD_INPUT = "standard input"
_LEVELS = 4
_MOST_NAMES = 500


def is_relative(name: str) -> bool:
    """Whether a path is literal, and relative."""
    return bool(name) and not is_open(name) and "${" not in name and not name.startswith(("~", "/"))


def bases(part: Part) -> Iterator[Path]:
    """Yield the directories a trainer may be started in: the working directory, the file's own, and those above it."""
    yield Path()
    if part.name == _STANDARD_INPUT or part.label:
        return
    directory = Path(part.name).absolute().parent
    yield from islice((one for one in (directory, *directory.parents) if one != one.parent), _LEVELS + 1)


def find(part: Part, name: str) -> Path | None:
    """Return the file or directory with that name, if it exists."""
    return next((path for base in bases(part) if is_there(path := below(base, name))), None)


def close_name(part: Part, name: str) -> str:
    """Return `did you mean 'x'?` for a file with a similar name in the same directory; empty if there is none."""
    for base in bases(part):
        directory = below(base, name).parent
        try:
            names = [one.name for one in islice(directory.iterdir(), _MOST_NAMES)]
        except (OSError, ValueError):
            continue
        if close := nearest_file_name(Path(name).name, names):
            return close
    return ""


def has_directory(part: Part, name: str) -> bool:
    """Whether the directory of a path exists, so that a file missing from it is really missing."""
    directory = str(Path(name).parent)
    return directory == "." or find(part, directory) is not None
