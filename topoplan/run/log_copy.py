"""The copy of a node's log on this machine: a beginning of the host's log, byte for byte.

`topoplan launch` and `topoplan runs attach` may watch the same run at the same time. Each byte is written once, as only
the process that holds the lock on the file continues it; the system lets go of the lock when that process ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self


class LogCopy:
    """A copy that this process continues."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """The copy, made if there is none yet; None where another process continues it.

        Raises:
            OSError: it cannot be written.
        """
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        return cls(path, handle)

    @property
    def size_bytes(self) -> int:
        """How much of the log is here."""
        return os.fstat(self._handle).st_size

    def read(self, start: int) -> bytes:
        """What is here from a byte on."""
        parts = []
        while part := os.pread(self._handle, 2**20, start):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def add(self, data: bytes) -> None:
        """Continue it. What was written before an error is still a beginning of the log.

        Raises:
            OSError: it cannot be written.
        """
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view) :]

    def close(self) -> None:
        """Let another process continue it. May be called again."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
