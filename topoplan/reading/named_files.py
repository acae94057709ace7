"""Files that others name by a relative path, looked up from wherever that path may start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from topoplan.errors import nearest
from topoplan.reading.parts import Part
from topoplan.reading.words import is_open
from topoplan.specs.source import below, is_there

_STANDARD_INPUT = "standard input"
_LEVELS = 4
_MOST_NAMES = 500


def is_relative(name: str) -> bool:
    """A path that is known as it is written, and starts somewhere on this machine."""
    return bool(name) and not is_open(name) and "${" not in name and not name.startswith(("~", "/"))


def bases(part: Part) -> Iterator[Path]:
    """Where a trainer may be started: the working directory, that of the file, and the ones above it."""
    yield Path()
    if part.name == _STANDARD_INPUT or part.label:
        return
    directory = Path(part.name).absolute().parent
    yield from islice((one for one in (directory, *directory.parents) if one != one.parent), _LEVELS + 1)


def find(part: Part, name: str) -> Path | None:
    """The file or directory of that name."""
    return next((path for base in bases(part) if is_there(path := below(base, name))), None)


def close_name(part: Part, name: str) -> str:
    """`did you mean 'x'?` for a file of the same directory that is spelled nearly so; empty where there is none."""
    for base in bases(part):
        directory = below(base, name).parent
        try:
            names = [one.name for one in islice(directory.iterdir(), _MOST_NAMES)]
        except (OSError, ValueError):
            continue
        if close := nearest(Path(name).name, names):
            return close
    return ""


def has_directory(part: Part, name: str) -> bool:
    """Whether the directory of a path is there, where it has one: what it lacks, it lacks."""
    directory = str(Path(name).parent)
    return directory == "." or find(part, directory) is not None
