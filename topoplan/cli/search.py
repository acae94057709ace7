"""Run searches, with their progress on the terminal, and keep them in the user's cache directory."""

from __future__ import annotations

import os
import signal
import stat
import sys
import zlib
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import topoplan
from topoplan.cli import STARTED_S
from topoplan.cli.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from topoplan.planner.plan import Ranking
    from topoplan.specs.spec import Spec


def search(
    spec: Spec,
    *,
    fresh: bool,
    keep_rejected: bool = False,
    best_only: bool = False,
    with_room: bool = False,
    partial: bool = False,
) -> Ranking:
    """Run `planner.search.rank`, with a progress line on standard error if it takes long on a terminal.

    A complete earlier search is reused unless `fresh`. Searches that keep every rejected layout are not cached, and a
    search for the best plan only answers questions of the same kind. With `partial`, the first Ctrl-C ends the search
    with what it has, and a second one ends the program.
    """
    how = "best with room" if with_room else "best only" if best_only else ""
    kept = None if fresh or keep_rejected else SearchCache(searches_directory(), how)
    if kept and (known := kept.find(spec)):
        return known

    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    interrupts = Interrupts(spared=1, then=signal.default_int_handler)
    with ProgressLine(partial=partial) as line, interrupts if partial else nullcontext():

        def progress(done: int, total: int) -> bool:
            line(done, total)
            return interrupts.count > 0

        ranking = rank(spec, progress=progress, keep_rejected=keep_rejected, best_only=best_only, with_room=with_room)
    if kept:
        kept.keep(ranking)
    return ranking


@contextmanager
def searches(count: int, *, fresh: bool) -> Iterator[Callable[[Spec], Ranking]]:
    """Provide a cached search for up to `count` specs, which share one progress line; none is searched twice."""
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    kept = SearchCache(None if fresh else searches_directory())
    done = -1

    def search_next(spec: Spec) -> Ranking:
        nonlocal done
        done += 1
        if known := kept.find(spec):
            return known
        ranking = rank(spec, progress=report if line.visible else None)
        kept.keep(ranking)
        return ranking

    def report(position: int, total: int) -> None:
        line(done * total + position, count * total)

    with ProgressLine() as line:
        yield search_next


MOST_BYTES = 32 * 2**20
"""Size limit of all cached searches together; one takes 5 to 25 KB."""
_MOST_KEPT_BYTES, _MOST_DOCUMENT_BYTES = 2**20, 32 * 2**20
"""Size limits of one search, compressed and uncompressed."""
_GZIP = 16 + zlib.MAX_WBITS


class SearchCache:
    """A cache of complete searches by their question, in memory and in a directory if it is usable."""

    def __init__(self, directory: Path | None, how: str = "") -> None:
        """Without a `directory`, only memory is used. `how` names searches for a single plan: `find` then also looks
        for those, and `keep` stores one of them."""
        self._directory, self._how = directory, how
        self._own: dict[str, bytes] = {}

    def find(self, spec: Spec) -> Ranking | None:
        """Return the cached ranking of a spec, or None."""
        whole = self._find(spec, _cache_key(spec))
        return whole or (self._find(spec, _cache_key(spec, self._how)) if self._how else None)

    def _find(self, spec: Spec, key: str) -> Ranking | None:
        from topoplan.planner.kept import from_json

        packed = self._own.get(key) or (_read(self._directory / _name(key)) if self._directory else None)
        document = None if packed is None else _unpacked(packed)
        return None if document is None else from_json(document, spec, key)

    def keep(self, ranking: Ranking) -> None:
        """Cache a search, if it is complete."""
        from topoplan.planner.kept import to_json

        if ranking.searched < 1.0:
            return
        key = _cache_key(ranking.spec, self._how)
        packer = zlib.compressobj(wbits=_GZIP)
        packed = packer.compress(to_json(ranking, key)) + packer.flush()
        if len(packed) > _MOST_KEPT_BYTES:
            return
        self._own[key] = packed
        if self._directory:
            with suppress(OSError):  # a full disk or a read-only home: the search is repeated next time
                _write(self._directory, _name(key), packed)
                _drop_oldest(self._directory)


def searches_directory() -> Path | None:
    """Return the cache directory according to the XDG base directories; None if there is no usable one."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        return None
    return base / "topoplan" / "searches" if _code() else None


def _cache_key(spec: Spec, how: str = "") -> str:
    """Return a hash of everything that the answer depends on; the repr of a spec covers all of its values."""
    versions = (topoplan.__version__, sys.version, version("networkx"))
    return sha256(f"{versions}\n{_code()}\n{how}{spec!r}".encode()).hexdigest()


@cache
def _code() -> str:
    """Return a hash of the state of the package's files, or an empty string if it is unknown. It is unknown if a file
    changed after the program started, because an older version may have been imported."""
    states = sorted(_states())
    last_s = max((changed_ns for _, _, *times in states for changed_ns in times), default=0) / 1e9
    # File systems have clocks of their own, which may lag slightly behind.
    is_known = 0 < last_s < STARTED_S - 1.0
    return sha256(repr(states).encode()).hexdigest() if is_known else ""


def _states() -> Iterator[tuple[str, int, int, int]]:
    """Yield path, size, and modification and change time of the package's files, which edits alter but not the version.
    The change time is set by the file system itself, while installers and copies may set the modification time."""
    folders = [*topoplan.__path__]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders += [entry.path] if entry.name != "__pycache__" else []
                else:
                    status = entry.stat()
                    yield entry.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _name(key: str) -> str:
    return f"{key}.json.gz"


def _read(path: Path) -> bytes | None:
    """Return the content of a file that belongs to the user, if it has a valid size."""
    try:
        status = path.lstat()
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return path.read_bytes() if ours and status.st_size <= _MOST_KEPT_BYTES else None
    except OSError:
        return None


def _unpacked(packed: bytes) -> bytes | None:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        document = unpacker.decompress(packed, _MOST_DOCUMENT_BYTES)
    except zlib.error:
        return None
    return document if unpacker.eof else None


def _write(directory: Path, name: str, packed: bytes) -> None:
    """Write a file atomically, even with concurrent writers. Raises OSError."""
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
    """Remove the oldest files until the rest is within the limit. Raises OSError."""
    files = [(file.lstat(), file) for file in directory.iterdir()]
    left = MOST_BYTES
    for status, file in sorted(files, key=lambda found: found[0].st_mtime_ns, reverse=True):
        left -= status.st_size
        if left < 0:
            file.unlink()
