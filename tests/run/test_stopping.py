import os
import re
import shutil
import signal
import time

from tests.bed.watched import Jobs, ends, sees
from tests.waiting import LIMIT_S, wait_until
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.run.following import Reconnect
from topoplan.run.node import node_state
from topoplan.run.settings import Settings
from topoplan.run.stopping import stop_all

TIMES = Settings(grace_s=LIMIT_S / 2, stop_s=LIMIT_S, drain_s=LIMIT_S)


def no_way(name: str, deadline_s: float) -> Connection:
    raise HostError("nobody is let in", host=name, problem="refused")


def again(jobs: Jobs) -> Reconnect:
    return lambda name, deadline_s: jobs.host(name)


def state(jobs: Jobs, name: str) -> str:
    return node_state(jobs.host(name), jobs.run_dir(name), deadline_s=LIMIT_S).state


def test_takes_in_what_the_nodes_say_at_the_end(jobs: Jobs) -> None:
    jobs.start(alpha="trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.02; done", beta="exit 0")
    with jobs.watch(jobs.node("alpha"), jobs.node("beta")) as watch:
        assert sees(watch, lambda: jobs.of("line") and watch.nodes[1].is_over)
        left = stop_all(watch.nodes, TIMES, reconnect=no_way, at_once=lambda: False, watch=watch)
        assert ends(watch)
    assert left == {}
    assert jobs.of("line")[-1] == "bye"
    assert (watch.nodes[0].code, watch.nodes[0].failure) == (3, "")


def test_logs_in_again_where_the_connection_is_gone(jobs: Jobs) -> None:
    jobs.start(alpha="sleep 610", beta="sleep 620")
    nodes = [jobs.node("alpha"), jobs.node("beta", connection=None)]
    nodes[0].connection.close()
    left = stop_all(nodes, TIMES, reconnect=again(jobs), at_once=lambda: False)
    assert (left, state(jobs, "alpha"), state(jobs, "beta")) == ({}, "ended", "ended")


def test_logs_in_again_where_following_the_log_is_all_that_a_host_allows(jobs: Jobs) -> None:
    with jobs.bed.restarted("alpha", "MaxSessions 1"):
        jobs.start(alpha="echo up; sleep 610", beta="exit 0")
        with jobs.watch(jobs.node("alpha")) as watch:
            assert sees(watch, lambda: jobs.of("line"))
            left = stop_all(watch.nodes, TIMES, reconnect=again(jobs), at_once=lambda: False, watch=watch)
        assert (left, state(jobs, "alpha")) == ({}, "ended")


def test_a_host_that_is_out_of_reach_is_named_and_the_others_are_stopped(jobs: Jobs) -> None:
    jobs.start(alpha="sleep 610", beta="sleep 620")
    nodes = [jobs.node("alpha", connection=None), jobs.node("beta")]
    left = stop_all(nodes, TIMES, reconnect=no_way, at_once=lambda: False)
    assert {name: str(error) for name, error in left.items()} == {"alpha": "alpha: nobody is let in"}
    assert (state(jobs, "alpha"), state(jobs, "beta")) == ("running", "ended")


def test_needs_no_run_directory(jobs: Jobs) -> None:
    jobs.start(alpha="echo up; setsid sleep 610 & sleep 620")
    jobs.said("alpha", b"up\n")
    node = jobs.node("alpha")
    node.started = node_state(jobs.host("alpha"), node.run_dir, deadline_s=LIMIT_S).started
    shutil.rmtree(node.run_dir)
    assert stop_all([node], TIMES, reconnect=no_way, at_once=lambda: False) == {}
    said = node_state(jobs.host("alpha"), node.run_dir, started=node.started, deadline_s=LIMIT_S)
    assert (said.state, said.directory, said.pids) == ("gone", "gone", ())


def test_names_what_may_be_left_of_a_node(jobs: Jobs) -> None:
    jobs.start(alpha="(env -i setsid sh -c 'exec sleep 630 3>held' &) ; echo up; sleep 620")
    jobs.said("alpha", b"up\n")
    wait_until(lambda: "sleep 630" in jobs.bed.processes("alpha").values(), "it holds the file")
    left = stop_all([jobs.node("alpha")], TIMES, reconnect=no_way, at_once=lambda: False)
    found = re.match(
        r"may belong to the run: process (\d+) \(sleep 630\), started .* UTC, holds a file", left["alpha"].what
    )
    assert found
    assert left["alpha"].remedy == (
        f"check with `ps -fp {found[1]}` on that host; if it belongs to the run, `kill {found[1]}`"
    )
    os.kill(int(found[1]), signal.SIGKILL)


def test_who_wants_to_leave_at_once_waits_for_nothing(jobs: Jobs) -> None:
    jobs.start(alpha="trap '' TERM; while :; do sleep 0.05; done")
    started = time.monotonic()
    left = stop_all([jobs.node("alpha")], Settings(grace_s=2 * LIMIT_S), reconnect=no_way, at_once=lambda: True)
    assert time.monotonic() - started < LIMIT_S
    assert left["alpha"].what == "not stopped yet"
