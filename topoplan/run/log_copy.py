"""The local copy of a node's log: the beginning of the host's log, byte for byte.

`topoplan launch` and `topoplan runs attach` may watch the same run at the same time. Each byte is written only once,
because only the process that holds the lock on the file appends to it; the system releases the lock when that process
ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self


class LogCopy:
    """A local copy that this process appends to."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open the copy, creating it if necessary; None if another process appends to it.

        Raises:
            OSError: the copy cannot be written.
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
        """Number of bytes of the log in the copy."""
        return os.fstat(self._handle).st_size

    def read(self, start: int) -> bytes:
        """Return the bytes of the copy from `start` on."""
        parts = []
        while part := os.pread(self._handle, 2**20, start):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def add(self, data: bytes) -> None:
        """Append to the copy. After an error, what was written before is still a beginning of the log.

        Raises:
            OSError: the copy cannot be written.
        """
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view) :]

    def close(self) -> None:
        """Let another process append to the copy. May be called repeatedly."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
