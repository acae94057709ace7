"""Attaching to launches on real sshd hosts."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bed.jobs import LABELS, NAMES, SETTINGS, After, Hosts, Once, StopAfter, both, read_until
from tests.bed.watched import texts
from tests.waiting import LIMIT_S, wait_until
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.ssh_config import Target
from topoplan.run import record as records
from topoplan.run.attach import AttachSession
from topoplan.run.events import Event
from topoplan.run.session import Outcome
from topoplan.run.settings import Settings

TIMES = Settings(
    tail_lines=1000,
    connect_s=LIMIT_S,
    linger_s=0.5,
    grace_s=0.5,
    stop_s=LIMIT_S,
    drain_s=LIMIT_S,
)


class Client:
    """A client that attaches to the last run."""

    def __init__(self, hosts: Hosts) -> None:
        self.events: list[Event] = []
        config = hosts.root / "ssh_config"
        bed = hosts.bed
        config.write_text(f"IdentityFile {bed.key}\nIdentityAgent none\nUserKnownHostsFile {bed.known_hosts}\n")
        self.run = records.update(records.load().run_id, ssh_config=str(config))

    def attach(
        self, *, settings: Settings = TIMES, on: Callable[[Event], None] = lambda event: None, **options: Any
    ) -> Outcome:
        def tell(event: Event) -> None:
            self.events.append(event)
            on(event)

        return AttachSession(self.run, Access(), settings=settings, tell=tell, **options).go()

    def of(self, kind: str, node: str = "") -> list[str]:
        return texts(self.events, kind, node)

    def assert_copies_are_whole(self) -> None:
        for node in self.run.nodes:
            assert self.run.log(node).read_bytes() == (Path(node.run_dir) / ".topoplan" / "log").read_bytes()


def release(hosts: Hosts) -> None:
    """Let jobs continue that wait for the file `go` in their workdir."""
    for name in NAMES:
        (hosts.workdir(name) / "go").touch()


WAIT = "echo begun; until [ -e '{}/go' ]; do sleep 0.02; done; seq 100"


def waits(hosts: Hosts) -> None:
    hosts.does(**{name: WAIT.format(hosts.workdir(name)) for name in NAMES})


def test_continues_the_copies_of_a_client_that_was_killed(hosts: Hosts) -> None:
    waits(hosts)
    process = hosts.start()
    read_until(process, "begun")
    process.kill()
    process.communicate()
    client = Client(hosts)
    attached = client.attach(on=Once("begun", lambda: release(hosts)))
    assert (attached.end, attached.code, attached.running) == ("ended", 0, ())
    assert [client.of("line", label)[-101:] for label in LABELS] == [["begun", *map(str, range(1, 101))]] * 4
    client.assert_copies_are_whole()
    assert (records.load().state, records.load().code) == ("ended", 0)


def test_beside_a_launch_and_another_one_copies_nothing_twice(hosts: Hosts) -> None:
    waits(hosts)
    launch = threading.Thread(target=hosts.launch)
    launch.start()
    wait_until(lambda: texts(hosts.events, "line", "").count("begun") == 4, "all run")
    clients = [Client(hosts), Client(hosts)]
    found: list[Outcome] = []
    threads = [threading.Thread(target=lambda one=one: found.append(one.attach())) for one in clients]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(one.of("line")) >= 4 for one in clients), "all are shown")
    release(hosts)
    for thread in (*threads, launch):
        thread.join(3 * LIMIT_S)
    assert [one.end for one in found] == ["ended", "ended"]
    for client in clients:
        assert [client.of("line", label)[-100:] for label in LABELS] == [[str(number) for number in range(1, 101)]] * 4
        assert not [text for text in client.of("note") if "log" in text]
    clients[0].assert_copies_are_whole()


def test_who_leaves_while_hosts_do_not_answer_leaves_at_once(hosts: Hosts) -> None:
    waits(hosts)
    hosts.launch(settings=replace(SETTINGS, detach=True))
    client = Client(hosts)
    asked: list[float] = []
    with hosts.bed.frozen("two"):
        started = time.monotonic()
        threading.Timer(0.3, lambda: asked.append(started)).start()
        attached = client.attach(interrupts=lambda: len(asked))
        assert time.monotonic() - started < LIMIT_S / 2
    assert (attached.end, attached.code, list(attached.running)) == ("left", 130, LABELS)
    hosts.stop_from_another_client()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts that refuse every new login."""
    names: list[str] = []

    def connect_unless(target: Target, access: Access, *, deadline_s: float) -> Connection:
        if names:
            raise HostError("nobody is let in", host=names[0], problem="refused")
        return connect(target, access, deadline_s=deadline_s)

    monkeypatch.setattr("topoplan.run.session.connect", connect_unless)
    return names


def test_a_host_that_cannot_be_seen_any_more_ends_nothing(hosts: Hosts, refused: list[str]) -> None:
    waits(hosts)
    hosts.launch(settings=replace(SETTINGS, detach=True))
    client = Client(hosts)
    refused.append("two")
    attached = client.attach(
        on=both(
            Once("begun", lambda: hosts.bed.end_sessions("two")),
            Once("is unreachable", lambda: release(hosts), "node-01"),
            Once("ended with", refused.clear, "node-03"),
        )
    )
    assert (attached.end, attached.code, attached.running) == ("ended", 0, ())
    assert client.of("line", "node-01")[-1] == "100"
    assert records.load().state == "ended"


def test_one_that_is_given_up_ends_the_watching_and_the_run_unless_asked_not_to(
    hosts: Hosts, refused: list[str]
) -> None:
    hosts.does("echo begun; exec sleep 600")
    hosts.launch(settings=replace(SETTINGS, detach=True))
    refused.append("two")

    def attach(settings: Settings) -> Outcome:
        begun = Once("begun", lambda: hosts.bed.end_sessions("two"))
        return Client(hosts).attach(on=begun, settings=settings)

    watched = attach(replace(TIMES, lost_after_s=1, stop_on_failure=False))
    assert (watched.end, watched.code, watched.failure) == ("unknown", 1, None)
    assert list(watched.running) == LABELS
    assert {name: str(error) for name, error in watched.errors.items()} == {"node-01": "two: nobody is let in"}
    assert records.load().state == "running"
    hosts.assert_jobs_are_on(*NAMES)
    stopped = attach(replace(TIMES, lost_after_s=1))
    assert (stopped.end, stopped.code, stopped.running) == ("failed", 1, ("node-01",))
    assert stopped.failure.what == "its host was unreachable for 1 s"
    assert records.load().state == "running"
    hosts.assert_jobs_are_on("two")
    hosts.stop_from_another_client()


def test_hosts_that_cannot_be_seen_at_first_are_waited_for(hosts: Hosts) -> None:
    hosts.does(f"echo begun; until [ -e {hosts.root}/go ]; do sleep 0.02; done; seq 100")
    hosts.launch(settings=replace(SETTINGS, detach=True))
    client = Client(hosts)

    def on(event: Event) -> None:
        if event.data.get("state") == "offline":
            (hosts.root / "go").touch()
            hosts.bed.show()

    hosts.bed.hide()
    attached = client.attach(on=on, settings=replace(TIMES, connect_s=1))
    assert (attached.end, attached.code) == ("ended", 0)
    assert [event.data["state"] for event in client.events if event.kind == "connection"] == ["offline", "online"]
    assert client.of("failure") == []
    client.assert_copies_are_whole()


def test_a_failure_stops_the_others_unless_asked_not_to(hosts: Hosts) -> None:
    waits(hosts)
    hosts.does("echo begun; sleep 600", three="echo begun; sleep 0.5; exit 8")
    hosts.launch(settings=replace(SETTINGS, detach=True))
    attached = Client(hosts).attach(settings=replace(TIMES, stop_on_failure=False))
    assert (attached.end, attached.code, attached.running) == ("failed", 8, ("node-00", "node-01", "node-03"))
    assert (attached.failure.node, attached.failure.tail[-1]) == ("node-02", "begun")
    hosts.assert_jobs_are_on("one", "two", "four")
    client = Client(hosts)
    again = client.attach()
    assert (again.end, again.code, again.running, dict(again.errors)) == ("failed", 8, (), {})
    hosts.assert_nothing_is_left()
    assert (records.load().state, records.load().reason) == ("failed", "node-02: ended with exit code 8")
    client.assert_copies_are_whole()


def test_what_somebody_else_stops_has_not_failed(hosts: Hosts) -> None:
    hosts.does("exec sleep 600")
    hosts.launch(settings=replace(SETTINGS, detach=True))
    client = Client(hosts)
    threads: list[threading.Thread] = []

    def stop() -> None:
        hosts.stop_from_another_client(LIMIT_S / 2)
        records.update(client.run.run_id, state="stopped")

    def on(event: Event) -> None:
        if event.data.get("step") == "watch":
            threads.append(threading.Thread(target=stop))
            threads[0].start()

    attached = client.attach(on=on, settings=replace(TIMES, linger_s=LIMIT_S))
    threads[0].join()
    assert (attached.end, attached.code, attached.failure) == ("stopped", 143, None)
    assert records.load().state == "stopped"


def test_who_leaves_while_somebody_else_stops_it_is_told_what_still_runs(hosts: Hosts) -> None:
    saves = "trap 'until [ -e {}/go ]; do sleep 0.02; done; exit 0' TERM; echo begun; while :; do sleep 0.02; done"
    hosts.does(**{name: saves.format(hosts.workdir(name)) for name in NAMES} | {"one": "exec sleep 600"})
    hosts.launch(settings=replace(SETTINGS, detach=True))
    client, waits = Client(hosts), After("another process is stopping the run")
    stop = StopAfter(hosts, After("begun", *LABELS[1:]), grace_s=60)
    attached = client.attach(on=both(waits, stop), interrupts=waits.count)
    assert (attached.end, attached.code, list(attached.running)) == ("stopped", 143, LABELS[1:])
    release(hosts)
    stop.join()


def test_a_failure_of_long_ago_is_told_at_once(hosts: Hosts) -> None:
    hosts.does("exec sleep 600", two="exit 6")
    hosts.launch(settings=replace(SETTINGS, detach=True))
    client = Client(hosts)
    end = Path(client.run.nodes[1].run_dir) / ".topoplan" / "exit"
    wait_until(end.exists, "it ends")
    code, up_s = end.read_text().split()
    end.write_text(f"{code} {float(up_s) - 300}\n")
    started = time.monotonic()
    attached = client.attach(settings=replace(TIMES, linger_s=299, stop_on_failure=False))
    assert time.monotonic() - started < 2 * LIMIT_S
    assert (attached.end, attached.code, len(attached.running)) == ("failed", 6, 3)
    hosts.stop_from_another_client()


def test_waits_for_the_launch_that_is_about_to_start_it(hosts: Hosts) -> None:
    hosts.does("echo up; exit 0")
    hosts.launch(settings=replace(SETTINGS, detach=True))
    records.update(records.load().run_id, state="starting")
    client = Client(hosts)
    began = threading.Timer(0.5, lambda: records.update(client.run.run_id, state="running"))
    began.start()
    attached = client.attach()
    began.join()
    assert [event.data["step"] for event in client.events if event.kind == "step"] == ["start", "connect", "watch"]
    assert (attached.end, records.load().state) == ("ended", "ended")


def test_a_run_whose_start_was_not_seen_to_end_is_not_stopped(hosts: Hosts) -> None:
    hosts.does("exec sleep 600")
    hosts.launch(settings=replace(SETTINGS, detach=True))
    run = records.load()
    not_yet = replace(run.nodes[1], run_dir=f"{run.nodes[1].run_dir}-not-yet", started=None)
    nodes = (run.nodes[0], not_yet, *run.nodes[2:])
    records.update(run.run_id, state="starting", nodes=nodes)
    attached = Client(hosts).attach(settings=replace(TIMES, starting_s=0.2))
    assert (attached.failure.node, attached.failure.what, attached.code) == ("node-01", "was never started", 1)
    hosts.assert_jobs_are_on(*NAMES)
    assert records.load().state == "starting"
    records.update(run.run_id, nodes=run.nodes)
    hosts.stop_from_another_client()
