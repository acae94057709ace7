"""Upload files to a host: as a tar stream into a new directory, verified there, and only then put in place.

A single command on the host manages that directory (scripts/put.sh): it creates it, unpacks the files, verifies their
SHA-256 and renames the directory. If its standard input ends early, it removes what is there, so nothing is left behind
by a client that was killed or a cable that was cut. SFTP could not promise that; nor do all hosts have SFTP, and it has
no error code for a full disk.

Other users may use the place too, with bad intentions. The directory is created anew with access for us alone, and so
are those above it up to the given one. Existing ones are refused if they are links, belong to somebody else, or are
writable by others. The given directory itself may be shared, as /tmp is, but must not let others rename its entries.
"""

from __future__ import annotations

import hashlib
import io
import math
import posixpath
import secrets
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

from topoplan.remote.connection import Connection, last_line, program
from topoplan.units import in_seconds

OURS = program("remote", "ours.sh")
"""Shell functions that tell whether a directory belongs to us alone."""
PUT = OURS + program("remote", "put.sh")
_NO_REASON = b"due to previous errors"
"""The end of tar's last line, which says only that there were other errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file to put on a host."""

    data: bytes
    mode: int = 0o644


def sums(files: Mapping[str, File | bytes]) -> str:
    """Return checksum lines of files, as input for `sha256sum --check`."""
    return "".join(_sum_line(name, entry.data if isinstance(entry, File) else entry) for name, entry in files.items())


def waiting_s(deadline_s: float) -> str:
    """Return a deadline as an argument for the command on the host: whole seconds."""
    return str(math.ceil(deadline_s))


def with_modes(files: Mapping[str, bytes]) -> dict[str, File]:
    """Return the files of a bundle with their modes: scripts are executable."""
    return {name: File(data=data, mode=0o755 if name.endswith(".sh") else 0o644) for name, data in files.items()}


def upload(
    connection: Connection,
    files: Mapping[str, File | bytes],
    directory: str,
    *,
    own_parts: int = 1,
    deadline_s: float,
) -> None:
    """Upload files into a new `directory`, by their relative names; it appears in one step with all its contents.

    A relative `directory` is in the user's home. The last `own_parts` components of its path are directories of ours
    alone; the one that contains them is created if necessary, and may be shared.

    Raises ValueError: a name is not relative or leads out of the directory, or a component of our own is no name.
    Raises HostError: `command` with the host's message, `lost`, `deadline`. The directory is then absent, or complete.
    """
    whole = {_relative(name): entry if isinstance(entry, File) else File(data=entry) for name, entry in files.items()}
    if not whole:
        return
    parts = directory.rstrip("/").split("/")
    own = parts[-own_parts:]
    if len(own) < own_parts or {"", ".", ".."} & {*own}:
        raise ValueError(f"the last {own_parts} parts of {directory!r} are no names")
    base = "/".join([*([] if directory.startswith("/") else ["."]), *parts[:-own_parts], ""])
    late = connection.target.error(
        "deadline",
        f"files were not put into {directory} within {in_seconds(deadline_s)}",
        "check the network, and the disk there; incomplete files are removed",
    )
    words = (base, "/".join(own), f".topoplan-{secrets.token_hex(6)}", waiting_s(deadline_s), sums(whole))
    done = connection.run(PUT, *words, stdin=_tar(whole), deadline_s=deadline_s, late=late)
    if done.code != 0:
        why = last_line(b"\n".join(line for line in done.stderr.splitlines() if not line.endswith(_NO_REASON)))
        raise connection.target.error(
            "command",
            f"files could not be put into {directory}{why}",
            next((remedy for reason, remedy in _REMEDIES.items() if reason in why), ""),
        )


_ELSEWHERE = "or name another `workdir` for the host in the spec"
_REMEDIES = {
    "No space left": f"make room there, {_ELSEWHERE}",
    "Wrote only": f"make room there, {_ELSEWHERE}",  # tar's message for a full disk
    "quota exceeded": f"make room there, {_ELSEWHERE}",
    "Permission denied": f"let the user write there, {_ELSEWHERE}",
    "Read-only file system": f"see why it is, {_ELSEWHERE}",
    "No such file": f"make the directory above it, {_ELSEWHERE}",
    "Not a directory": f"move the file that is in the way, {_ELSEWHERE}",
    "File exists": f"move the file that is in the way, {_ELSEWHERE}",
    "non-directory": f"move the file that is in the way, {_ELSEWHERE}",
    "command not found": "install coreutils and tar on it",
    "it is a link": f"remove it, {_ELSEWHERE}",
    "it belongs to": f"have it removed, {_ELSEWHERE}",
    "others can write in it": f"remove that permission with `chmod go-w`, {_ELSEWHERE}",
    "anybody can rename": "prevent it with `chmod +t`, or name a directory of your own as `workdir` in the spec",
}
"""By the system's message in English; for other languages there is no remedy."""


def _relative(name: str) -> str:
    tidy = posixpath.normpath(name)
    if tidy.startswith(("/", "../")) or tidy in (".", "..") or "\n" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the relative name of a file")
    return tidy


def _tar(files: Mapping[str, File]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(file.data), file.mode
            tar.addfile(entry, io.BytesIO(file.data))
    return buffer.getvalue()


def _sum_line(name: str, data: bytes) -> str:
    """Return a line as sha256sum writes it: backslashes in a name are doubled, and the line then begins with one."""
    escaped = name.replace("\\", "\\\\")
    return f"{chr(92) if escaped != name else ''}{hashlib.sha256(data).hexdigest()}  {escaped}\n"
