"""Whether the launch of a run still exists and may restart it: a lock that the system releases when the launch ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from topoplan.run.record import RunRecord


def _file(record: RunRecord) -> Path:
    return record.directory() / "launch.lock"


@contextlib.contextmanager
def launch_lock(record: RunRecord) -> Iterator[None]:
    """Let other processes see that this one manages the run. Without effect where files cannot be locked."""
    handle = None
    try:
        with contextlib.suppress(OSError):
            handle = os.open(_file(record), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def is_launch_alive(record: RunRecord) -> bool:
    """Whether another process manages the run."""
    try:
        handle = os.open(_file(record), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several checks may run at once
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
