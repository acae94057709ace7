"""Write a bundle or a single file atomically, and never over somebody's own work.

The process may be killed, or the machine lose power, at any moment. New content is written to a staging directory,
synced to disk and renamed into place; a bundle that is being replaced carries a marker meanwhile (`bundle/whole.py`).
Leftovers of a killed process have recognizable names and are removed by the next process that writes there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from topoplan.bundle.whole import Digests, digest, is_nobodys, mark_text, read_mark
from topoplan.errors import OutputError
from topoplan.trainers.trainer import MAIN_FILE, PLAN_FILE
from topoplan.units import named

MANIFEST = ".topoplan-manifest.json"
"""Lists the files of the bundle with their SHA-256, which tells edited files from untouched ones."""

_SCHEMA = "topoplan.manifest/1"
_STAGING = ".topoplan-writing"
_LOCK = "lock"
_WAIT_S = 10.0
"""Seconds to wait for another process that writes to the same place; it normally needs milliseconds."""
_LOOK_S = 0.05
_ELSEWHERE = "name another directory with -o"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_bundle(files: Mapping[str, str], directory: Path, *, force: bool = False) -> list[Path]:
    """Write `files` (relative path -> text) below `directory` and return the paths, in order.

    An existing bundle is replaced if nobody edited it; files that the new bundle lacks are removed, and unrelated files
    (logs, checkpoints) stay. Without `force`, refuses a directory that has files but no bundle, and a bundle with an
    edited file. `files` must contain MAIN_FILE.

    On an error, the directory is left as it was. If the process is killed, the directory has the old bundle, the new
    one, or a marker that says that it is incomplete, until another call completes it.
    """
    for name in files:
        if not _is_inside(name):
            raise ValueError(f"not a path inside a bundle: {name!r}")
    try:
        if directory.exists() and not directory.is_dir():
            raise OutputError("is a file", where=str(directory), expected="expected a directory")
        target = directory.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staging(_place_to_stage(target)) as staging:
            earlier = _earlier(directory)
            if not force:
                _refuse_foreign(files, directory, earlier)
            stale = [name for name in earlier if name not in files and _digest(directory / name) in earlier[name]]
            _stage({**files, MANIFEST: _manifest_text(files)}, staging / "new")
            if directory.is_dir():
                _replace(directory, staging, list(files), stale)
            else:
                (staging / "new").rename(target)
                _sync(target.parent)
    except OSError as error:
        # An error about a file outside the bundle concerns a temporary file, whose name means nothing to the user.
        at = Path(str(error.filename or directory))
        ours = directory in at.parents and _STAGING not in at.parts
        raise OutputError(
            f"cannot write: {error.strerror or error}",
            where=str(at if ours else directory),
            remedy=f"free some space, or {_ELSEWHERE}" if error.errno in _FULL else _ELSEWHERE,
        ) from error
    return [directory / name for name in files]


def write_file(name: str | Path, text: str, *, mark: str, writer: str, force: bool | None = None) -> None:
    """Write one file atomically. `text` starts with `mark`, which identifies an earlier file written by topoplan.

    A device or a pipe is written to and stays what it is. Raises OutputError if another file is in the way, unless
    `force`; None means that the command has no such option.
    """
    path = Path(name)
    try:
        refuse_no_file(name)
        if is_stream(path):
            path.write_text(text, encoding="utf-8")
            return
        if not force and os.path.lexists(path):
            with path.open("rb") as earlier:
                ours = earlier.read(len(mark.encode())) == mark.encode()
            if not ours:
                other = "name another" if force is None else "name another, or overwrite with --force"
                raise OutputError(f"exists and was not written by `{writer}`", where=str(path), remedy=other)
        target = Path(os.path.realpath(path))  # replace the target of a link, not the link
        with _staging(_place_to_stage(target)) as staging:
            _stage({target.name: text}, staging / "new")
            (staging / "new" / target.name).replace(target)
            _sync(target.parent)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", where=str(path)) from error


def refuse_no_file(name: str | Path) -> None:
    """Raise OutputError if a name cannot be that of a file to write."""
    path = Path(name)
    if not str(name):
        raise OutputError("the name of the file to write is empty", expected="expected the path of a file")
    if path.is_dir() or str(name).endswith("/"):
        raise OutputError("is a directory", where=str(name), expected="expected a file")
    if not os.path.lexists(path.parent):
        remedy = "make it, or name another file"
        raise OutputError("no such directory", where=str(path.parent), remedy=remedy)


def is_stream(path: Path) -> bool:
    """Return whether a path is a device, a pipe or a socket, which must not be replaced by a file."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name and name != MANIFEST


# Existing files ------------------------------------------------------------------------------------------------------


def listed(directory: Path) -> Digests:
    """Return the digests in a directory's manifest; empty if there is none, or an unreadable one."""
    try:
        document = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            return {}
        entries = {str(name): frozenset([str(known)]) for name, known in document["files"].items()}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return entries if all(map(_is_inside, entries)) else {}


def bundle_changes(directory: Path) -> tuple[list[str], list[str]]:
    """Return the files of a directory's bundle that were edited since it was written, and those that are missing."""
    earlier = listed(directory)
    missing = [name for name in earlier if not os.path.lexists(directory / name)]
    edited = [name for name in earlier if name not in missing and _digest(directory / name) not in earlier[name]]
    return edited, missing


def _earlier(directory: Path) -> Digests:
    """Return the digests of topoplan's files in a directory: of a bundle, or of what is left of two."""
    marked = read_mark(directory)
    if marked is None:
        return listed(directory)
    named_there = {name: known for name, known in marked.items() if _is_inside(name)}
    return {**named_there, MAIN_FILE: frozenset([_digest(directory / MAIN_FILE)])}


def _manifest_text(files: Mapping[str, str]) -> str:
    digests = {name: digest(files[name].encode("utf-8")) for name in sorted(files)}
    return json.dumps({"schema": _SCHEMA, "files": digests}, indent=2) + "\n"


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file; empty if there is none."""
    return digest(path.read_bytes()) if path.is_file() else ""


def _refuse_foreign(files: Mapping[str, str], directory: Path, earlier: Digests) -> None:
    if not directory.is_dir():
        return
    remedy = f"{_ELSEWHERE}, or overwrite with --force"
    if not earlier:
        names = sorted(path.name for path in directory.iterdir() if path.name != _STAGING)
        if names:
            raise OutputError(
                f"holds files that are not a bundle of topoplan: {named(names)}", where=str(directory), remedy=remedy
            )
        return

    def is_work(name: str) -> bool:
        """Return whether something at that path would be lost."""
        path = directory / name
        if not path.is_file():
            return os.path.lexists(path)
        data, new = path.read_bytes(), files.get(name, "").encode("utf-8")
        return digest(data) not in earlier.get(name, ()) and data != new and not is_nobodys(name, data, new)

    if edited := [name for name in earlier if is_work(name)]:
        raise OutputError(f"was edited since topoplan wrote it: {named(edited)}", where=str(directory), remedy=remedy)
    if foreign := [name for name in files if name not in earlier and is_work(name)]:
        raise OutputError(
            f"holds a file of the same name that topoplan did not write: {named(foreign)}",
            where=str(directory),
            remedy=remedy,
        )


# The staging directory -----------------------------------------------------------------------------------------------


def _place_to_stage(target: Path) -> Path:
    """Return a staging path on the target's file system: next to it, or inside it if it is a mount point or its parent
    is not writable."""
    inside = target.is_dir() and (target.is_mount() or not os.access(target.parent, os.W_OK))
    return target / _STAGING if inside else target.with_name(f".{target.name}{_STAGING}")


@contextlib.contextmanager
def _staging(place: Path) -> Iterator[Path]:
    """Provide an empty staging directory with an exclusive lock, and remove it afterwards. The system releases the lock
    when the process ends, however it ends. Raises OutputError if another process holds the lock for too long."""
    lock = _locked(place, time.monotonic() + _WAIT_S)
    try:
        _empty(place)
        yield place
    finally:
        _empty(place)
        with contextlib.suppress(OSError):
            (place / _LOCK).unlink()
            place.rmdir()
        os.close(lock)


def _locked(place: Path, until: float) -> int:
    """Create the directory and its lock file if needed, and return a handle that holds the lock."""
    while True:
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # the previous holder is just removing the directory
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise OutputError("is in the way, and not of this user", where=str(place), remedy="remove it")
            path = place / _LOCK
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if _has_lock(handle) and os.path.samestat(os.fstat(handle), path.stat()):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
        if time.monotonic() > until:
            raise OutputError("another process of topoplan writes there", where=str(place), remedy="wait for its end")
        time.sleep(_LOOK_S)


def _has_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no lock support on this file system: go on as if no other process existed
    return True


def _empty(place: Path) -> None:
    for entry in place.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink(missing_ok=True)


def _stage(files: Mapping[str, str], place: Path) -> None:
    """Create the directory `place` with these files, synced to disk."""
    place.mkdir()
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))
        if path.suffix == ".sh":
            path.chmod(0o755)
    # Sync after all writes: by then, most files are already covered by a flush of the file system's journal.
    for path in [place, *place.rglob("*")]:
        _sync(path)


def _sync(path: Path) -> None:
    """Make changes to a file or a directory survive a loss of power."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync a directory
            raise
    finally:
        os.close(handle)


# Replacing a bundle --------------------------------------------------------------------------------------------------


def _replace(directory: Path, staging: Path, files: Collection[str], stale: Collection[str]) -> None:
    """Move the files in `staging/new` into place and remove stale ones, with the marker in place meanwhile. On an
    error, the previous files are restored; the marker is then replaced last, too."""
    new, old, mark = staging / "new", staging / "old", staging / "mark"
    # The plan first, because the command that repairs a bundle starts from it.
    others = (name for name in files if name != MAIN_FILE)
    names = [*sorted(others, key=lambda name: name != PLAN_FILE), MANIFEST]
    for name in (MAIN_FILE, *names, *stale):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            raise IsADirectoryError(errno.EISDIR, "a directory is in the way", str(target))
        if os.path.lexists(target):
            (old / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target, old / name, follow_symlinks=False)
    known = {
        name: frozenset(filter(None, (_digest(new / name), _digest(directory / name)))) for name in (*files, *stale)
    }
    _stage({MAIN_FILE: mark_text(known)}, mark)
    touched = [MAIN_FILE]
    try:
        (mark / MAIN_FILE).replace(directory / MAIN_FILE)
        _sync(directory)
        for name in names:
            touched.append(name)
            (new / name).replace(directory / name)
        for name in stale:
            touched.append(name)
            (directory / name).unlink()
        for place in {(directory / name).parent for name in touched}:
            _sync(place)
        (new / MAIN_FILE).replace(directory / MAIN_FILE)
    except BaseException:
        if (new / MAIN_FILE).exists():  # otherwise the new bundle is already complete
            for name in reversed(touched):
                if os.path.lexists(old / name):
                    (old / name).replace(directory / name)
                else:
                    (directory / name).unlink(missing_ok=True)
        raise
    _sync(directory)
