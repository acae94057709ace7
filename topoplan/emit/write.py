"""Puts a bundle into a directory, or one file into place: all of it or nothing, and never over somebody's own work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from topoplan.errors import OutputError
from topoplan.units import named

MANIFEST = ".topoplan-manifest.json"
"""Names the files of the bundle with their SHA-256: how an edited file is told from an untouched one."""

_SCHEMA = "topoplan.manifest/1"


def write_bundle(files: Mapping[str, str], directory: Path, *, force: bool = False) -> list[Path]:
    """Write `files` (relative path -> text) below `directory` and return the paths, in order.

    A bundle that is already there is replaced if nobody touched it; its files that the new one lacks are removed, and
    other files beside it (logs, checkpoints) stay. Refused without `force`: a directory with files but no bundle, and
    a bundle with an edited file. On an error the directory is as it was before.
    """
    for name in files:
        _check_name(name)
    try:
        if directory.exists() and not directory.is_dir():
            raise OutputError("is a file", where=str(directory), expected="expected a directory")
        earlier = _manifest(directory)
        if not force:
            _refuse_foreign(files, directory, earlier)
        stale = [name for name in earlier if name not in files and _unedited(directory / name, earlier[name])]
        with _staged({**files, MANIFEST: _manifest_text(files)}, directory) as staging:
            if directory.is_dir():
                _move_into(staging, directory, [*files, MANIFEST], stale)
            else:
                staging.rename(directory)
    except OSError as error:
        # A file at fault that is none of the bundle's is a temporary one, which nobody knows.
        at = Path(str(error.filename or directory))
        raise OutputError(
            f"cannot write: {error.strerror or error}",
            where=str(at if directory in at.parents else directory),
            remedy="name another directory with -o",
        ) from error
    return [directory / name for name in files]


def write_file(path: Path, text: str, *, mark: str, writer: str, force: bool | None = None) -> None:
    """Write one file, whole or not at all. `text` begins with `mark`, by which an earlier one of ours is known.

    Raises OutputError for another file in the way, unless `force`; None says that there is no such option.
    """
    try:
        if path.is_dir():
            raise OutputError("is a directory", where=str(path), expected="expected a file")
        if not force and os.path.lexists(path):
            with path.open("rb") as earlier:
                ours = earlier.read(len(mark.encode())) == mark.encode()
            if not ours:
                other = "name another" if force is None else "name another, or overwrite with --force"
                raise OutputError(f"exists and was not written by `{writer}`", where=str(path), remedy=other)
        target = path.resolve()  # what a link leads to is replaced, not the link
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        staged = Path(name)
        try:
            os.close(handle)
            staged.write_bytes(text.encode("utf-8"))
            staged.chmod(0o666 & ~_umask())  # mkstemp makes 0600
            staged.replace(target)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", where=str(path)) from error


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or name == MANIFEST:
        raise ValueError(f"not a path inside a bundle: {name!r}")


def _manifest(directory: Path) -> dict[str, str]:
    """File name -> SHA-256 of the bundle in `directory`; empty where there is none, or none that can be read."""
    try:
        document = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            return {}
        entries = {str(name): str(digest) for name, digest in document["files"].items()}
        for name in entries:
            _check_name(name)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return entries


def bundle_changes(directory: Path) -> tuple[list[str], list[str]]:
    """Files of the bundle in `directory` that were edited since it was written, and those that are missing."""
    earlier = _manifest(directory)
    missing = [name for name in earlier if not os.path.lexists(directory / name)]
    edited = [name for name in earlier if name not in missing and not _unedited(directory / name, earlier[name])]
    return edited, missing


def _manifest_text(files: Mapping[str, str]) -> str:
    digests = {name: hashlib.sha256(files[name].encode("utf-8")).hexdigest() for name in sorted(files)}
    return json.dumps({"schema": _SCHEMA, "files": digests}, indent=2) + "\n"


def _unedited(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _refuse_foreign(files: Mapping[str, str], directory: Path, earlier: Mapping[str, str]) -> None:
    if not directory.is_dir():
        return
    if not earlier:
        names = sorted(path.name for path in directory.iterdir())
        if names:
            raise OutputError(
                f"holds files that are not a bundle of topoplan: {named(names)}",
                where=str(directory),
                remedy="name another directory with -o, or overwrite with --force",
            )
        return
    edited, _ = bundle_changes(directory)
    if edited:
        raise OutputError(
            f"was edited since topoplan wrote it: {named(edited)}",
            where=str(directory),
            remedy="name another directory with -o, or overwrite with --force",
        )
    foreign = [name for name in files if name not in earlier and os.path.lexists(directory / name)]
    if foreign:
        raise OutputError(
            f"holds a file of the same name that topoplan did not write: {named(foreign)}",
            where=str(directory),
            remedy="name another directory with -o, or overwrite with --force",
        )


@contextlib.contextmanager
def _staged(files: Mapping[str, str], directory: Path) -> Iterator[Path]:
    """A directory beside the target, with all the files in it; what is left of it is removed at the end."""
    target = directory.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that it is on the same file system and a rename is atomic.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        staging.chmod(0o777 & ~_umask())  # mkdtemp makes 0700, and this directory may become the bundle
        for name, text in files.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8"))
            if path.suffix == ".sh":
                path.chmod(0o755)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move_into(staging: Path, directory: Path, names: list[str], stale: list[str]) -> None:
    """Replace files one by one; the old ones wait in `staging` until all are in place, and come back on an error."""
    kept = staging / ".replaced"
    moved: list[str] = []
    created: list[str] = []
    try:
        for name in [*stale, *names]:
            target, source = directory / name, staging / name
            if target.is_dir() and not target.is_symlink():
                raise IsADirectoryError(21, "a directory is in the way", str(target))
            if os.path.lexists(target):
                (kept / name).parent.mkdir(parents=True, exist_ok=True)
                target.rename(kept / name)
                moved.append(name)
            if name in names:
                target.parent.mkdir(parents=True, exist_ok=True)
                source.rename(target)
                created.append(name)
    except BaseException:
        for name in created:
            (directory / name).unlink(missing_ok=True)
        for name in moved:
            (kept / name).rename(directory / name)
        raise


def _umask() -> int:
    mask = os.umask(0o022)  # the only way to read it is to set it
    os.umask(mask)
    return mask
