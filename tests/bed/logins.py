"""Logins to the bed, and how they may fail."""

import os
import subprocess

import pytest

from tests.waiting import LIMIT_S
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.ssh_config import Target


def log_in(target: Target, access: Access | None = None, *, deadline_s: float = LIMIT_S) -> Connection:
    return connect(target, access or Access(), deadline_s=deadline_s)


def refused(target: Target, access: Access | None = None, *, deadline_s: float = LIMIT_S) -> HostError:
    with pytest.raises(HostError) as caught:
        log_in(target, access, deadline_s=deadline_s).close()
    assert caught.value.host == target.name
    assert "Traceback" not in str(caught.value)
    return caught.value


def hostname(connection: Connection) -> str:
    return connection.run(["hostname"], deadline_s=LIMIT_S).stdout.decode().strip()


def children() -> set[int]:
    """Return the child processes that have not been waited for, including zombies."""
    lister = subprocess.Popen(["ps", "--ppid", str(os.getpid()), "-o", "pid="], stdout=subprocess.PIPE, text=True)
    return {int(word) for word in lister.communicate()[0].split()} - {lister.pid}
