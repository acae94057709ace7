"""OpenSSH's known-hosts files: look up the keys that a host may have, and add new ones.

The format is that of sshd(8), SSH_KNOWN_HOSTS FILE FORMAT. paramiko's parser stops at a line with a marker such as
@revoked and does not support patterns.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["known", "unknown", "changed", "revoked"]

_adding = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKey:
    """A public key of a host."""

    kind: str
    """Key type: `ssh-ed25519`, `ssh-rsa`, `ecdsa-sha2-nistp256` ..."""
    blob: bytes
    """The key as it is sent over the wire."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint, `SHA256:...`, as ssh and ssh-keygen print it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLine:
    """A line of a known-hosts file that applies to a host."""

    file: Path
    number: int
    marker: str
    """Empty, `@revoked` or `@cert-authority`."""
    key: HostKey

    @property
    def place(self) -> str:
        """The position of the line, `file:line`."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the files say about one host."""

    lines: tuple[KnownLine, ...]
    """The lines that match its name, including @revoked ones."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Types of the keys that the host may have: the ones to ask the host for."""
        return tuple(dict.fromkeys(line.key.kind for line in self.lines if not line.marker))

    @property
    def by_authority(self) -> bool:
        """Whether the files trust certificates for the host."""
        return any(line.marker == "@cert-authority" for line in self.lines)

    def verdict(self, key: HostKey) -> Verdict:
        """Whether the host may have `key`. A key other than the known ones is `changed`, even one of another type."""
        if any(line.marker == "@revoked" and line.key == key for line in self.lines):
            return "revoked"
        plain = [line for line in self.lines if not line.marker]
        if any(line.key == key for line in plain):
            return "known"
        return "changed" if plain else "unknown"

    def first(self) -> KnownLine | None:
        """Return the first line with a key of the host."""
        return next((line for line in self.lines if not line.marker), None)


def look_up(name: str, files: Iterable[Path]) -> Known:
    """Return what the files say about `name`, which is `[host]:port` if the port is not 22.

    As in ssh, malformed lines and missing files are ignored.
    """
    lines = [line for file in files for line in _read(file, name)]
    if name.startswith("[") and not any(not line.marker for line in lines):
        # ssh also accepts the key listed for the plain name.
        host = name[1 : name.rindex("]")]
        lines += [line for file in files for line in _read(file, host)]
    return Known(lines=tuple(lines))


def add(name: str, key: HostKey, file: Path, *, hashed: bool) -> bool:
    """Append a line for `name`, unless the file has the key already; return whether it was. May raise OSError."""
    with _adding:
        if look_up(name, [file]).verdict(key) == "known":
            return False
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        line = f"{_hashed(name) if hashed else name} {key.kind} {base64.b64encode(key.blob).decode()}\n".encode()
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            os.write(handle, line)
        finally:
            os.close(handle)
        return True


def _read(file: Path, name: str) -> list[KnownLine]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or not _names(words[0], name):
            continue
        try:
            key = HostKey(kind=words[1], blob=base64.b64decode(words[2], validate=True))
        except binascii.Error:
            continue
        found.append(KnownLine(file=file, number=number, marker=marker, key=key))
    return found


def _names(patterns: str, name: str) -> bool:
    """Whether the first field of a line matches `name`: a hash, or names and patterns with `*`, `?` and `!`."""
    if patterns.startswith("|1|"):
        _, _, salt, want = (patterns + "||").split("|")[:4]
        try:
            mine = hmac.digest(base64.b64decode(salt), name.encode(), "sha1")
            return hmac.compare_digest(mine, base64.b64decode(want))
        except binascii.Error:
            return False
    meant = False
    for pattern in patterns.lower().split(","):
        wanted = pattern.removeprefix("!")
        # `[` is part of `[host]:port`, not the start of a set of characters.
        if fnmatch.fnmatchcase(name.lower(), wanted.replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            meant = True
    return meant


def _hashed(name: str) -> str:
    salt = os.urandom(20)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
