import threading

from tests.bed.bed import Bed
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect


def test_a_command_that_ends_while_it_is_fed_does_no_harm(bed: Bed) -> None:
    with connect(bed.target("alpha"), Access(), deadline_s=90) as connection:
        for _ in range(30):
            assert connection.run(["true"], stdin=b"x" * 2**18, deadline_s=90).code == 0
        assert connection.is_alive


def test_connections_that_end_together_leave_their_jump_host_to_the_others(bed: Bed) -> None:
    names = [f"node{index}" for index in range(8)]
    targets = {name: bed.target("inside", "jump", name=name) for name in names}
    connections = connect_all(targets, Access(), deadline_s=90)
    last = connections.pop(names[-1])
    threads = [threading.Thread(target=one.close) for one in connections.values() if isinstance(one, Connection)]
    assert len(threads) == len(names) - 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(5):
        assert last.run(["true"], deadline_s=90).code == 0
    last.close()
