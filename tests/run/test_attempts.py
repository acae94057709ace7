"""Runs that are restarted, on real sshd hosts."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bed.jobs import LABELS, SETTINGS, After, Hosts, Once, Ran, both
from tests.run.test_attach import Client
from tests.waiting import LIMIT_S
from topoplan.remote.identities import Access
from topoplan.run.attempts import RetryingLaunch, lost_steps, resumed_at_step
from topoplan.run.events import Event
from topoplan.run.record import Attempt, load
from topoplan.run.session import Outcome
from topoplan.run.settings import Settings

BEGINS = """\
exec 9>"{root}/$HOSTNAME.rank"
flock -n 9 || echo an old rank lives >>"{root}/beside"
first="{root}/$HOSTNAME.begun"
"""
"""Every process of a job holds the lock, wherever it goes."""
TRAINS = BEGINS + "setsid sleep 600 & echo \"{{'loss': 1.0}}\"; [ -e $first ] || {{ : >$first; sleep 600; }}; kill $!"
FAILS = BEGINS + "[ -e $first ] || {{ : >$first; sleep 0.5; {fault}; }}"


AGAIN = replace(SETTINGS, retries=2, back_s=5 * 60)


def launch(hosts: Hosts, *, settings: Settings = AGAIN, on: Callable[[Event], None] = lambda event: None) -> Ran:
    events: list[Event] = []

    def tell(event: Event) -> None:
        events.append(event)
        on(event)

    started = time.monotonic()
    outcome = RetryingLaunch(hosts.bundle, hosts.targets(), Access(), settings=settings, tell=tell).go()
    assert not (hosts.root / "beside").exists()
    return Ran(outcome=outcome, events=events, took_s=time.monotonic() - started)


def does(hosts: Hosts, fault: str) -> None:
    hosts.does(TRAINS.format(root=hosts.root), three=FAILS.format(root=hosts.root, fault=fault))


def test_a_rank_that_was_killed_is_worth_another_start(hosts: Hosts) -> None:
    does(hosts, "kill -KILL $$")
    ran = launch(hosts)
    assert (ran.outcome.end, ran.outcome.code) == ("ended", 0), ran.failure
    (attempt,) = ran.outcome.attempts
    assert (attempt.node, "137" in attempt.reason) == ("node-02", True)
    assert "it is not known whether by the kernel" in attempt.reason
    record = load()
    assert (record.state, record.attempts) == ("ended", (attempt,))
    assert {node.run_dir for node in record.nodes}.isdisjoint(attempt.run_dirs)
    assert sorted(path.name for path in record.directory().glob("node-02*")) == ["node-02.2.log", "node-02.log"]


@pytest.mark.parametrize(
    "fault",
    [
        "exit 7",
        "echo CUDA out of memory; exit 1",
        "echo No space left on device; exit 1",
        "echo 'slurmstepd: error: Detected 1 oom_kill event in StepId=1.0'; kill -KILL $$",
    ],
)
def test_what_would_go_wrong_again_is_not(hosts: Hosts, fault: str) -> None:
    does(hosts, fault)
    ran = launch(hosts)
    assert (ran.outcome.end, ran.outcome.attempts, load().state) == ("failed", (), "failed")


def test_a_host_that_is_gone_is_waited_for_as_an_old_rank_may_live_there(hosts: Hosts) -> None:
    hosts.does(TRAINS.format(root=hosts.root))
    waits = After("until nothing of the run can be left; waiting up to 5 min for node-02")

    def heal(event: Event) -> None:
        before = waits.seen
        waits(event)
        if waits.seen and not before:
            threading.Timer(3, hosts.bed.heal, ["three"]).start()  # while it is asked again and again

    cut = Once("loss", lambda: hosts.bed.cut("three"))
    ran = launch(hosts, settings=replace(AGAIN, lost_after_s=2), on=both(cut, heal))
    assert (ran.outcome.end, ran.outcome.code) == ("ended", 0)
    assert [attempt.node for attempt in ran.outcome.attempts] == ["node-02"]
    assert waits.seen


def test_a_host_that_goes_away_once_more_is_waited_for(hosts: Hosts) -> None:
    """Its disk has lost a checkpoint, so it resumes from another step than the others, which is reported."""
    step = "[ $HOSTNAME = three ] && step=10 || step=20\n"
    goes_on = 'echo "node-00.sh: the trainer resumes from out/checkpoint-$step"; sleep 1'
    begins = f'[ ! -e "{hosts.root}/$HOSTNAME.begun" ] || {{ {goes_on}; }}\n'
    hosts.does(step + begins + TRAINS.format(root=hosts.root))
    boot = threading.Timer(2, hosts.bed.boot, ["three"])
    away = Once("restarting the run", lambda: hosts.bed.shut_down("three"), "")
    back = Once("the restart waits until all hosts are reachable", boot.start, "")
    ran = launch(hosts, on=both(Once("loss", lambda: hosts.bed.reboot("three", 0)), away, back))
    boot.join()
    assert (ran.outcome.end, ran.outcome.code, len(ran.outcome.attempts)) == ("ended", 0, 1)
    notes = "\n".join(ran.of("note"))
    assert "the restart waits until all hosts are reachable; waiting up to 5 min for node-02" in notes
    assert "different checkpoints" in notes
    assert "node-02 from step 10" in notes


def test_who_stops_the_run_meanwhile_is_heard(hosts: Hosts) -> None:
    does(hosts, "kill -KILL $$")
    ran = launch(hosts, on=Once("restarting the run", hosts.stop_from_another_client, ""))
    assert (ran.outcome.end, load().state) == ("stopped", "stopped")


def test_who_watches_too_follows_to_the_next_attempt(hosts: Hosts) -> None:
    """The attached session leaves failures to the launch."""
    does(hosts, f"echo loss; until [ -e {hosts.root}/go ]; do sleep 0.1; done; kill -KILL $$")
    watched: list[Outcome] = []
    client: list[Client] = []

    def watch() -> None:
        client.append(Client(hosts))
        go = Once("loss", lambda: (hosts.root / "go").touch())
        watched.append(client[0].attach(on=go))

    thread = threading.Thread(target=watch)
    ran = launch(hosts, on=Once("loss", thread.start))
    thread.join(3 * LIMIT_S)
    assert (ran.outcome.end, len(ran.outcome.attempts)) == ("ended", 1)
    [outcome] = watched
    assert (outcome.end, outcome.code) == ("ended", 0), outcome.failure
    assert "the launch of this run is still active and may restart it; Ctrl-C stops watching" in client[0].of("note")
    assert load().state == "ended"


def test_steps_that_were_done_twice_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "node-00.log"
    log.write_text("node-00.sh: the trainer resumes from /out/checkpoint-500\n{'loss': 1.0}\n")
    assert resumed_at_step(log) == 500
    assert resumed_at_step(tmp_path / "none") is None

    def attempt(first: int | None, last: int | None) -> Attempt:
        return Attempt(ended="", node=LABELS[0], host="h", reason="", first_step=first, last_step=last)

    # 80 steps after the first checkpoint, 120 after the second; none in a start that reached no step.
    assert lost_steps([attempt(None, 580), attempt(500, 720), attempt(600, None)], 600) == 80 + 120
