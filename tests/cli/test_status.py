import json

from tests.cli.conftest import Cli
from tests.cli.live_run import LiveRun
from topoplan.run import record


def test_says_of_each_node_how_it_is(cli: Cli, live: LiveRun) -> None:
    live.start("echo hello; sleep 600", "exit 3")
    live.wait_for(["running", "ended"])
    live.wait_for_log(0, b"hello\n")
    shown = cli("status")
    assert shown.code == 0
    assert shown.out.startswith("live-1: running; made 2030-01-01 10:00 UTC, 2 nodes\n")
    rows = {line.split()[0]: line.rstrip() for line in shown.out.splitlines() if line.startswith("node-")}
    assert rows["node-00"].endswith("running")
    assert "6 B" in rows["node-00"]
    assert rows["node-01"].endswith("ended with exit code 3")


def test_json_has_what_the_table_has(cli: Cli, live: LiveRun) -> None:
    live.start("echo up; sleep 600")
    live.wait_for_log(0, b"up\n")
    document = json.loads(cli("status", "liv", "--json").out)
    assert (document["schema"], document["run_id"]) == ("topoplan.status/1", "live-1")
    assert (document["state"], document["code"]) == ("running", None)
    first, second = document["nodes"]
    assert (first["node"], first["host"], first["state"]) == (0, "alpha", "running")
    assert len(first["pids"]) >= 2
    assert second["state"] == "never-started"


def test_a_host_that_cannot_be_reached_hides_no_other(cli: Cli, live: LiveRun) -> None:
    live.start("sleep 600", "sleep 600")
    with live.unreachable(1):
        shown = cli("status")
        assert shown.code == 1
        assert "running" in shown.out
        assert "unreachable: nothing listens on port 9" in " ".join(shown.out.split())
        document = json.loads(cli("status", "--json").out)
        assert [node["state"] for node in document["nodes"]] == ["running", "unreachable"]
        assert document["nodes"][1]["problem"] == "refused"
        assert document["state"] == "running"
    assert record.load().state == "running"


def test_notes_the_end_of_a_run_whose_client_has_gone(cli: Cli, live: LiveRun) -> None:
    live.start("exit 0", "kill -9 $$")
    live.wait_for(["ended", "ended"])
    assert "ended with exit code 137 (SIGKILL)" in cli("status").out
    noted = record.load()
    assert (noted.state, noted.code) == ("failed", 137)
    assert noted.ended is not None


def test_says_how_it_is_where_its_record_cannot_be_written(cli: Cli, live: LiveRun) -> None:
    live.start("exit 3", "exit 0")
    live.wait_for(["ended", "ended"])
    (live.record.directory() / ".lock").unlink()
    (live.record.directory() / ".lock").mkdir()  # prevents changes to the record, like a full disk
    shown = cli("status")
    assert shown.code == 0
    assert "ended with exit code 3" in shown.out
    assert "the record of the run cannot be written" in shown.err
