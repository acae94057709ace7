"""Lookup of files that other files name by a relative path, from wherever that path may start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from topoplan.errors import InputError, nearest_file_name
from topoplan.reading.parts import Part
from topoplan.reading.words import is_open
from topoplan.specs.source import below, is_there, read_text

_STANDARD_INPUT = "standard input"
_LEVELS = 4
"""Directory levels to search upward, from a repository's examples to its root."""
_MOST_NAMES = 500
_HOSTS, _HOSTS_SCHEMA = "hosts.json", "topoplan.hosts/"


def is_relative(name: str) -> bool:
    """Whether a path is literal, and relative."""
    return bool(name) and not is_open(name) and "${" not in name and not name.startswith(("~", "/"))


def bases(part: Part) -> Iterator[Path]:
    """Yield the directories a trainer may be started in: the working directory, the file's own, and those above it.

    Of a file in a bundle, these are only those of `beside`.
    """
    started = _of_bundle(part)
    yield from started or (Path(),)
    if part.name == _STANDARD_INPUT or part.label or started:
        return
    yield from islice(_upward(part), _LEVELS + 1)


def beside(part: Part) -> tuple[Path, ...]:
    """Return the working directory and the file's own.

    The run of a bundle has a working directory of its own: the `workdir` of its host, or else the bundle.
    """
    return _of_bundle(part) or (Path.cwd(), Path(part.name).parent)


def own_first(part: Part) -> tuple[Path, ...]:
    """Return the directories in which a file that a script names may be: the script's own comes first."""
    own = Path(part.name).parent
    return (own, *(_of_bundle(part) or (Path(), *islice(own.resolve().parents, _LEVELS))))


def _upward(part: Part) -> Iterator[Path]:
    directory = Path(part.name).absolute().parent
    return (one for one in (directory, *directory.parents) if one != one.parent)


def _of_bundle(part: Part) -> tuple[Path, ...]:
    """Return where the run of a bundle starts on each host, and the bundle; nothing for a file in no bundle.

    Only `topoplan generate` writes a hosts.json with this schema.
    """
    directory = Path(part.name).parent
    if part.name == _STANDARD_INPUT or not is_there(directory / _HOSTS, Path.is_file):
        return ()
    try:
        document = json.loads(read_text(directory / _HOSTS))
        if not document["schema"].startswith(_HOSTS_SCHEMA):
            return ()
        started = [Path(node["workdir"] or directory) for node in document["nodes"]]
    except (InputError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()
    return tuple(dict.fromkeys((*started, directory)))


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
