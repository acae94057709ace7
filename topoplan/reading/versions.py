"""The package versions that files are for, from lock files, `pip install` in scripts, and the environment."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from topoplan.reading.setup import Setup

_LOCKS = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml")
_LISTS = ("requirements.txt", "requirements.lock", "environment.yml", "environment.yaml")
_PIN = re.compile(r"[ \t]*(?:-[ \t]+)?['\"]?([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?[ \t]*==[ \t]*([0-9][\w.+!]*)['\"]?")
_MOST_BYTES = 10_000_000


def is_lock(path: str) -> bool:
    """Whether a file only lists versions of packages."""
    return Path(path).name in (*_LOCKS, *_LISTS)


def stated_versions(paths: Iterable[str], setup: Setup) -> dict[str, str]:
    """Return package -> version, from three sources of increasing precedence.

    These are the current environment, lock files among the paths and beside them, and `pip install` in the scripts.
    """
    given = [Path(path) for path in paths]
    places = dict.fromkeys([Path(), *(path if path.is_dir() else path.parent for path in given)])
    found = dict(_installed(setup))
    for place in places:
        for name in (*_LISTS, *_LOCKS):
            found |= _of_file(place / name)
    for path in given:
        found |= _of_file(path) if is_lock(str(path)) else {}
    return found | {pin.package: pin.version for pin in setup.pins}


def pins(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the package versions that a command pins with `pip install`."""
    if "install" in words and any(word.startswith(("pip", "uv")) or word == "-m" for word in words[:3]):
        yield from (found for word in words if (found := _pin(word)))


def _pin(text: str) -> tuple[str, str] | None:
    match = _PIN.match(text)
    return (canonicalize_name(match[1]), match[2].rstrip(".")) if match else None


def _installed(setup: Setup) -> Iterator[tuple[str, str]]:
    for package in {one.package for one in setup.recognizers if one.package}:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def _of_file(path: Path) -> Mapping[str, str]:
    """Return the versions in a lock file; none if the file is missing or broken."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
        text = path.read_text(encoding="utf-8")
        if path.name in _LISTS:
            return dict(found for line in text.splitlines() if (found := _pin(line)))
        document = tomllib.loads(text)
    except (OSError, ValueError):
        return {}
    packages = document.get("package", document.get("packages", ()))
    rows = packages if isinstance(packages, list) else ()
    return {
        canonicalize_name(str(row["name"])): str(row["version"])
        for row in rows
        if isinstance(row, Mapping) and {"name", "version"} <= row.keys()
    }
