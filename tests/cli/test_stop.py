import json
import os
import shutil
import signal

import pytest

from tests.cli.conftest import Cli
from tests.cli.live_run import LiveRun
from tests.waiting import wait_until
from topoplan.run import record


def jobs(live: LiveRun) -> list[str]:
    lines = [line for name in ("alpha", "beta") for line in live.bed.processes(name).values()]
    return [line for line in lines if "sleep" in line]


def test_ends_a_run_on_all_hosts_and_says_so(cli: Cli, live: LiveRun) -> None:
    live.start("exec sleep 610", "trap '' TERM; setsid sleep 620 & echo up; while :; do sleep 0.1; done")
    live.wait_for_log(1, b"up\n")
    shown = cli("stop", "--grace", "4")
    assert shown.code == 0
    assert "stopped, exit code 143 (SIGTERM)" in shown.out
    assert "stopped, exit code 137 (SIGKILL)" in shown.out
    assert shown.out.endswith("live-1: nothing of it is left running.\n")
    assert jobs(live) == []
    assert record.load().state == "stopped"
    again = cli("stop")
    assert (again.code, again.out.count("nothing was running")) == (0, 2)


def test_json_says_what_the_table_says(cli: Cli, live: LiveRun) -> None:
    live.start("exec sleep 610")
    document = json.loads(cli("stop", "--json").out)
    assert (document["schema"], document["stopped"]) == ("topoplan.stop/1", True)
    first, second = document["nodes"]
    assert first == {
        "node": 0,
        "host": "alpha",
        "stopped": True,
        "was_running": True,
        "left": [],
        "code": 143,
        "may_be": [],
        "directory": "there",
        "gpus_unseen": False,
    }
    assert second["was_running"] is False


def test_ends_the_others_where_a_host_cannot_be_reached(cli: Cli, live: LiveRun) -> None:
    live.start("exec sleep 610", "exec sleep 620")
    with live.unreachable(1):
        shown = cli("stop")
        assert shown.code == 1
        assert "unknown: nothing listens on port 9" in " ".join(shown.out.split())
        assert "not all of it is known to have ended; run `topoplan runs stop live-1` again" in " ".join(
            shown.out.split()
        )
        assert json.loads(cli("stop", "--json").out)["nodes"][1]["problem"] == "refused"
    assert record.load().state == "running"
    wait_until(lambda: len(jobs(live)) == 1, "only that of the other host runs")
    assert cli("stop").code == 0
    assert jobs(live) == []


def test_ends_a_run_whose_directories_were_deleted(cli: Cli, live: LiveRun) -> None:
    live.start("echo up; setsid sleep 610 & sleep 620", "echo up; exec env -i sleep 630")
    for node in live.record.nodes:
        live.wait_for_log(node.node, b"up\n")
        shutil.rmtree(node.run_dir)
    shown = " ".join(cli("status").out.split())
    assert shown.count("running; its run directory is missing") == 2
    shown = " ".join(cli("stop").out.split())
    assert shown.count("stopped; its run directory is missing") == 2
    assert shown.endswith("live-1: nothing of it is left running.")
    assert jobs(live) == []
    assert record.load().state == "stopped"


def test_names_what_may_be_left_and_leaves_it_alone(cli: Cli, live: LiveRun) -> None:
    daemon = "env -i setsid sh -c 'exec sleep 640 3>held' &"
    live.start(f"({daemon}) ; exit 0", "exit 0")
    live.wait_for(["ended", "ended"])
    wait_until(lambda: jobs(live) == ["sleep 640"], "it holds the file")
    shown = cli("stop")
    words = " ".join(shown.out.split())
    assert shown.code == 1
    assert "nothing was running; may belong to the run: process " in words
    assert "(sleep 640), started " in words
    assert "holds a file of this run open; check with `ps -fp " in words
    assert "what is known to belong to it has ended" in words
    document = json.loads(cli("stop", "--json").out)
    (held,) = document["nodes"][0]["may_be"]
    assert (held["command"], held["holds"], document["stopped"]) == ("sleep 640", "file", False)
    assert len(jobs(live)) == 1
    os.kill(held["pid"], signal.SIGKILL)
    assert cli("stop").code == 0


def test_changes_nothing_from_a_machine_that_is_offline_and_neither_does_status(cli: Cli, live: LiveRun) -> None:
    if live.bed.kind != "namespaces":
        pytest.skip("hosts are hidden in namespaces")
    live.start("exec sleep 610", "exit 3")
    live.wait_for(["running", "ended"])
    wait_until(lambda: jobs(live) == ["sleep 610"], "it sleeps")
    with live.bed.hidden(how="unreachable"):
        shown, asked = cli("stop"), cli("status")
    assert (shown.code, asked.code) == (1, 1)
    assert "this machine seems to be offline; not all of it is known to have ended" in " ".join(shown.out.split())
    assert asked.out.startswith("live-1: not known, this machine seems to be offline; made ")
    assert (record.load().state, jobs(live)) == ("running", ["sleep 610"])


def test_says_what_it_did_where_its_record_cannot_be_written(cli: Cli, live: LiveRun) -> None:
    live.start("exec sleep 610", "exec sleep 620")
    (live.record.directory() / ".lock").unlink()
    (live.record.directory() / ".lock").mkdir()  # prevents changes to the record, like a full disk
    shown = cli("stop")
    assert (shown.code, jobs(live)) == (0, [])
    assert "nothing of it is left running" in shown.out
    assert "the record of the run cannot be written" in shown.err


def test_a_run_that_has_ended_keeps_its_end(cli: Cli, live: LiveRun) -> None:
    live.start("exit 0", "exit 0")
    live.wait_for(["ended", "ended"])
    assert cli("status").code == 0
    assert record.load().state == "ended"
    assert cli("stop").code == 0
    assert (record.load().state, record.load().code) == ("ended", 0)
