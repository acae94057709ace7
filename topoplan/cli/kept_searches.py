"""Searches of before, in the user's cache directory, so that the same question is not searched twice."""

from __future__ import annotations

import os
import stat
import sys
import zlib
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import topoplan
from topoplan.cli import STARTED_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topoplan.planner.plan import Ranking
    from topoplan.specs.spec import Spec

MOST_BYTES = 32 * 2**20
"""Of all searches together. One takes 5 to 25 KB."""
_MOST_KEPT_BYTES, _MOST_DOCUMENT_BYTES = 2**20, 32 * 2**20
"""Of one search, in its file and unpacked."""
_GZIP = 16 + zlib.MAX_WBITS


class KeptSearches:
    """Whole searches by what was asked: those of this object, and those of a directory where it can be used."""

    def __init__(self, directory: Path | None, how: str = "") -> None:
        """None: what this object is given, and nothing else. `how` names searches that look for one plan only: they are
        found, too, and what is kept is one of them."""
        self._directory, self._how = directory, how
        self._own: dict[str, bytes] = {}

    def find(self, spec: Spec) -> Ranking | None:
        """The ranking of a spec, if it was kept."""
        whole = self._find(spec, _question(spec))
        return whole or (self._find(spec, _question(spec, self._how)) if self._how else None)

    def _find(self, spec: Spec, question: str) -> Ranking | None:
        from topoplan.planner.kept import from_json

        packed = self._own.get(question) or (_read(self._directory / _name(question)) if self._directory else None)
        document = None if packed is None else _unpacked(packed)
        return None if document is None else from_json(document, spec, question)

    def keep(self, ranking: Ranking) -> None:
        """Keep a search, if it is whole."""
        from topoplan.planner.kept import to_json

        if ranking.searched < 1.0:
            return
        question = _question(ranking.spec, self._how)
        packer = zlib.compressobj(wbits=_GZIP)
        packed = packer.compress(to_json(ranking, question)) + packer.flush()
        if len(packed) > _MOST_KEPT_BYTES:
            return
        self._own[question] = packed
        if self._directory:
            with suppress(OSError):  # a full disk, or a home that cannot be written: it is searched again
                _write(self._directory, _name(question), packed)
                _drop_oldest(self._directory)


def searches_directory() -> Path | None:
    """Where searches are kept, by the XDG base directories; None where nowhere."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return base / "topoplan" / "searches" if _code() else None


def _question(spec: Spec, how: str = "") -> str:
    """Everything that an answer depends on. Specs are values through and through, so that their text says all."""
    versions = (topoplan.__version__, sys.version, version("networkx"))
    return sha256(f"{versions}\n{_code()}\n{how}{spec!r}".encode()).hexdigest()


@cache
def _code() -> str:
    """The state of the files that answers come from, nothing where that is not known.

    It is not of files that were changed after the program began, as it may have read them before.
    """
    states = sorted(_states())
    last_s = max((changed_ns for _, _, *times in states for changed_ns in times), default=0) / 1e9
    # File systems tell times by a clock of their own, which may be a little behind.
    is_known = 0 < last_s < STARTED_S - 1.0
    return sha256(repr(states).encode()).hexdigest() if is_known else ""


def _states() -> Iterator[tuple[str, int, int, int]]:
    """Path, bytes and times of change of the package's files: an edit leaves the version as it is.

    The last is the file system's own, where the other is what an installer or a copy sets it to.
    """
    folders = [*topoplan.__path__]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders += [entry.path] if entry.name != "__pycache__" else []
                else:
                    status = entry.stat()
                    yield entry.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _name(question: str) -> str:
    return f"{question}.json.gz"


def _read(path: Path) -> bytes | None:
    """What a file holds, if it is one of ours."""
    try:
        status = path.lstat()
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return path.read_bytes() if ours and status.st_size <= _MOST_KEPT_BYTES else None
    except OSError:
        return None


def _unpacked(packed: bytes) -> bytes | None:
    """The document, if it is whole."""
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        document = unpacker.decompress(packed, _MOST_DOCUMENT_BYTES)
    except zlib.error:
        return None
    return document if unpacker.eof else None


def _write(directory: Path, name: str, packed: bytes) -> None:
    """Write a file whole or not at all, whoever writes it at the same time. Raises OSError."""
    from tempfile import NamedTemporaryFile

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=directory, delete=False) as file:
        unnamed = Path(file.name)
        try:
            file.write(packed)
            file.close()
            unnamed.replace(directory / name)
        except BaseException:
            unnamed.unlink(missing_ok=True)
            raise


def _drop_oldest(directory: Path) -> None:
    """Remove the files that were written first, until the others are within bounds. Raises OSError."""
    files = [(file.lstat(), file) for file in directory.iterdir()]
    left = MOST_BYTES
    for status, file in sorted(files, key=lambda found: found[0].st_mtime_ns, reverse=True):
        left -= status.st_size
        if left < 0:
            file.unlink()
