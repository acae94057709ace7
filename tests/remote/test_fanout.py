import contextlib
import threading
import time

import pytest

from tests.bed.bed import Bed, new_key
from tests.waiting import LIMIT_S, eventually
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all, run_on_all
from topoplan.remote.identities import Access

MANY = 32


def close_all(results: dict[str, Connection | HostError]) -> None:
    for result in results.values():
        if isinstance(result, Connection):
            result.close()


def good(results: dict[str, Connection | HostError]) -> dict[str, Connection]:
    found = {name: result for name, result in results.items() if isinstance(result, Connection)}
    assert len(found) == len(results), {name: str(result) for name, result in results.items() if name not in found}
    return found


class TestConnectAll:
    def test_logs_in_to_many_hosts_at_once_and_keeps_their_order(self, bed: Bed) -> None:
        on = ("alpha", "beta", "bare", "strict")
        targets = {f"node{index}": bed.target(on[index % 4], name=f"node{index}") for index in range(MANY)}
        seen: list[str] = []
        connections = good(
            connect_all(targets, Access(), deadline_s=90, on_done=lambda name, result: seen.append(name))
        )
        assert list(connections) == list(targets)
        assert sorted(seen) == sorted(targets)
        results = run_on_all(
            connections, lambda name, one: one.run(["echo", name], deadline_s=60).stdout, deadline_s=60
        )
        close_all(dict(connections))
        assert results == {name: name.encode() + b"\n" for name in targets}

    def test_gives_each_failure_as_data(self, bed: Bed) -> None:
        targets = {
            "fine": bed.target("alpha", name="fine"),
            "deaf": bed.target("alpha", name="deaf", port=9),
            "stranger": bed.target("alpha", name="stranger", user_known_hosts_files=()),
            "outsider": bed.target("alpha", name="outsider", identity_files=()),
        }
        results = connect_all(targets, Access(), deadline_s=30)
        close_all(results)
        problems = {name: result.problem for name, result in results.items() if isinstance(result, HostError)}
        assert problems == {"deaf": "refused", "stranger": "key-unknown", "outsider": "auth"}
        assert isinstance(results["fine"], Connection)

    def test_is_not_held_up_by_one_host(self, bed: Bed) -> None:
        order: list[str] = []
        with contextlib.ExitStack() as ice:
            ice.enter_context(bed.frozen("beta"))

            def done(name: str, result: Connection | HostError) -> None:
                order.append(name)
                ice.close()

            results = connect_all({name: bed.target(name) for name in ("beta", "alpha")}, Access(), on_done=done)
        close_all(dict(good(results)))
        assert order == ["alpha", "beta"]

    def test_waits_for_a_host_until_the_deadline(self, bed: Bed) -> None:
        started = time.monotonic()
        with bed.frozen("beta"):
            results = connect_all({"beta": bed.target("beta")}, Access(), deadline_s=0.4)
        assert 0.4 <= time.monotonic() - started < LIMIT_S
        assert isinstance(results["beta"], HostError)

    def test_tries_again_where_an_sshd_takes_few_logins_at_a_time(self, bed: Bed) -> None:
        targets = {f"few{index}": bed.target("few", name=f"few{index}") for index in range(10)}
        close_all(dict(good(connect_all(targets, Access(), deadline_s=90))))

    def test_shares_one_connection_to_a_jump_host(self, bed: Bed) -> None:
        names = [f"node{index}" for index in range(12)]
        targets = {
            name: bed.target(("inside", "inside2")[index % 2], "jump", name=name) for index, name in enumerate(names)
        }
        connections = good(connect_all(targets, Access(), deadline_s=90))

        def sessions() -> list[str]:
            return [line for line in bed.processes("jump").values() if line.startswith(f"sshd: {bed.user}")]

        assert eventually(lambda: len(sessions()) == 1)  # those of earlier tests may still be ending
        for connection in connections.values():
            assert connection.run(["true"], deadline_s=LIMIT_S).code == 0
            connection.close()
        assert eventually(lambda: not sessions())

    def test_names_the_jump_host_where_all_behind_it_fail(self, bed: Bed) -> None:
        jump = bed.target("jump", port=9)
        targets = {name: bed.target(name, jumps=(jump,)) for name in ("inside", "inside2")}
        results = connect_all(targets, Access(), deadline_s=30)
        for name, result in results.items():
            assert (result.host, result.problem) == (name, "refused")
            assert result.what.startswith("jump host jump: nothing listens")

    def test_asks_for_a_passphrase_once_for_all_hosts(self, bed: Bed) -> None:
        key = bed.directory / "sealed"
        allowed = bed.directory / "authorized_keys"
        before = allowed.read_text()
        allowed.write_text(before + new_key(key, "open sesame") + "\n")
        questions: list[str] = []

        def ask(question: str) -> str:
            questions.append(question)
            return "open sesame"

        targets = {name: bed.target(name, identity_files=(key,)) for name in ("alpha", "beta", "bare")}
        close_all(dict(good(connect_all(targets, Access(ask=ask)))))
        allowed.write_text(before)
        assert len(questions) == 1

    def test_closes_what_it_opened_when_it_is_interrupted(self, bed: Bed) -> None:
        opened: list[Connection] = []

        def stop(name: str, result: Connection | HostError) -> None:
            opened.append(result)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            connect_all({name: bed.target(name) for name in ("alpha", "beta")}, Access(), on_done=stop)
        assert opened
        assert not any(connection.is_alive for connection in opened)

    def test_of_no_hosts_is_nothing(self) -> None:
        assert connect_all({}, Access()) == {}


class TestRunOnAll:
    def test_gives_results_and_failures_by_host(self, bed: Bed) -> None:
        connections = good(connect_all({name: bed.target(name) for name in ("alpha", "beta")}, Access()))

        def job(name: str, connection: Connection) -> None:
            if name == "beta":
                connection.run(["sleep", "600"], deadline_s=0.2)

        results = run_on_all(connections, job, deadline_s=LIMIT_S)
        assert results["alpha"] is None
        assert results["beta"].problem == "deadline"
        close_all(dict(connections))

    def test_closes_the_connection_of_a_job_that_is_late(self, bed: Bed) -> None:
        connections = good(connect_all({name: bed.target(name) for name in ("alpha", "beta")}, Access()))
        started = time.monotonic()
        results = run_on_all(
            connections,
            lambda name, one: one.run(["sleep", "0" if name == "alpha" else "600"], deadline_s=600).code,
            deadline_s=6,
        )
        assert time.monotonic() - started < LIMIT_S
        assert results["alpha"] == 0
        assert (results["beta"].host, results["beta"].problem) == ("beta", "deadline")
        assert connections["alpha"].is_alive
        assert not connections["beta"].is_alive
        close_all(dict(connections))

    def test_lets_mistakes_of_a_job_through(self, bed: Bed) -> None:
        connections = good(connect_all({"alpha": bed.target("alpha")}, Access()))

        def job(name: str, connection: Connection) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_on_all(connections, job, deadline_s=30)
        close_all(dict(connections))


def test_threads_end_with_their_connections(bed: Bed) -> None:
    before = threading.active_count()
    close_all(dict(good(connect_all({name: bed.target(name) for name in ("alpha", "beta")}, Access()))))
    # The watching thread ends a second after the last connection.
    assert eventually(lambda: threading.active_count() <= before + 1)
