from __future__ import annotations

import threading
import time

import pytest

from tests.bed.bed import Bed
from topoplan.remote import channel
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all
from topoplan.remote.keys import Access
from topoplan.remote.ssh import connect

WINDOW_BYTES = 2 * 2**20
"""Of OpenSSH, for a session: what it takes before the command reads any of it."""


def test_only_as_much_is_sent_as_the_other_side_takes(bed: Bed) -> None:
    with connect(bed.target("alpha"), Access(), deadline_s=30) as connection:
        session = connection.transport.open_session()
        session.exec_command("sleep 60")
        total = 0
        while sent := channel.send(session, b"x" * 100_000, wait_s=0.2):
            assert sent <= 32 * 1024
            total += sent
        assert WINDOW_BYTES <= total <= 2 * WINDOW_BYTES
        started = time.monotonic()
        assert channel.send(session, b"x", wait_s=0.1) == 0
        assert time.monotonic() - started >= 0.1


def test_nothing_is_sent_after_the_end(bed: Bed) -> None:
    with connect(bed.target("alpha"), Access(), deadline_s=30) as connection:
        session = connection.transport.open_session()
        session.exec_command("cat >/dev/null; sleep 60")
        assert channel.end(session)
        assert channel.end(session)
        with pytest.raises(BrokenPipeError):
            channel.send(session, b"x")
        session.close()
        assert channel.end(session)


def test_a_lost_connection_is_noticed_when_sending(bed: Bed) -> None:
    with connect(bed.target("beta"), Access(), deadline_s=30) as connection:
        session = connection.transport.open_session()
        session.exec_command("cat")
        bed.restart("beta")
        while connection.is_alive:
            time.sleep(0.01)
        with pytest.raises((EOFError, BrokenPipeError)):
            channel.send(session, b"x")


def test_a_command_that_ends_while_it_is_fed_does_no_harm(bed: Bed) -> None:
    with connect(bed.target("alpha"), Access(), deadline_s=30) as connection:
        for _ in range(30):
            assert connection.run(["true"], stdin=b"x" * 2**18, deadline_s=10).code == 0
        assert connection.is_alive


def test_connections_that_end_together_leave_their_jump_host_to_the_others(bed: Bed) -> None:
    names = [f"node{index}" for index in range(8)]
    targets = {name: bed.target("inside", "jump", name=name) for name in names}
    connections = connect_all(targets, Access(), deadline_s=90)
    last = connections.pop(names[-1])
    assert isinstance(last, Connection)
    threads = [threading.Thread(target=one.close) for one in connections.values() if isinstance(one, Connection)]
    assert len(threads) == len(names) - 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(5):
        assert last.run(["true"], deadline_s=10).code == 0
    last.close()
