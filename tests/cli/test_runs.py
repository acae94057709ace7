import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bundle.samples import make_spec_and_plan
from tests.cli.conftest import Cli
from tests.cli.live_run import LiveRun
from tests.run.test_bundle_reader import bundle_at
from tests.waiting import LIMIT_S, wait_until
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.hosts.needs import RunNeeds
from topoplan.planner.predict import predict
from topoplan.run import record
from topoplan.run.record import Measurement, NodeRecord, RunRecord


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def make(run_id: str, created: str, hosts: int = 2, **changes: object) -> None:
    nodes = tuple(
        NodeRecord(node=number, name=f"h{number}", address=f"h{number}", run_dir=f"/w/{run_id}", script="n.sh")
        for number in range(hosts)
    )
    record.create(RunRecord(run_id=run_id, name="x", bundle="/b", created=created, nodes=nodes, **changes))  # type: ignore[arg-type]


def test_without_any_it_says_so(cli: Cli) -> None:
    assert cli("runs").out == "No runs were started from this machine by this user.\n"
    assert json.loads(cli("runs", "--json").out) == {"schema": "topoplan.runs/1", "runs": [], "unreadable": []}


def test_preflight_of_a_bundle_knows_the_runs_that_may_be_on_the_hosts(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        make(f"a-{number}", f"2030-01-0{number + 1}T00:00:00.000+00:00", state="running" if number < 2 else "ended")
    asked: list[dict[str, str]] = []

    def checked(hosts: object, cluster: object, needs: RunNeeds, *, skip: object) -> tuple[()]:
        asked.append(dict(needs.earlier_runs))
        return ()

    monkeypatch.setattr("topoplan.hosts.preflight.preflight.preflight", checked)
    monkeypatch.setattr("topoplan.remote.fanout.logged_in", lambda *_: nullcontext(SimpleNamespace(results={})))
    assert cli("preflight", bundle_at(tmp_path / "bundle")).code == 0
    assert asked == [{"h0": "a-1", "h1": "a-1"}]


def test_they_come_by_time_with_what_was_last_seen(cli: Cli) -> None:
    make("b-1", "2030-01-02T08:30:00.000+00:00", state="failed", code=137)
    make("a-2", "2030-01-03T00:00:00.000+00:00", hosts=9, state="running")
    lines = [line.split() for line in cli("runs").out.splitlines()[2:4]]
    assert lines == [
        ["b-1", "2030-01-02", "08:30", "2", "failed,", "exit", "code", "137", "h0,", "h1"],
        ["a-2", "2030-01-03", "00:00", "9", "running", "h0", "...", "h8"],
    ]


def test_what_cannot_be_read_is_named_and_hides_nothing(cli: Cli, tmp_path: Path) -> None:
    make("good-1", "2030-01-02T08:30:00.000+00:00")
    (tmp_path / "topoplan" / "runs" / "bad-1").mkdir()
    shown = cli("runs")
    assert shown.code == 0
    assert "good-1" in shown.out
    assert "- bad-1: no record in it" in shown.out
    document = json.loads(cli("runs", "--json").out)
    assert [run["run_id"] for run in document["runs"]] == ["good-1"]
    assert document["runs"][0]["nodes"][1]["address"] == "h1"
    assert document["unreadable"] == [{"run_id": "bad-1", "error": "no record in it"}]


def test_those_that_have_ended_are_forgotten_with_their_logs(cli: Cli, tmp_path: Path) -> None:
    long_ago, now = "2020-01-02T08:30:00.000+00:00", record.now_text()
    make("old-1", long_ago, state="failed", ended=long_ago)
    make("new-1", now, state="ended", ended=now)
    make("runs-1", long_ago, state="running")
    places = tmp_path / "topoplan" / "runs"
    (places / "old-1" / "node-00.log").write_bytes(b"x" * 3 * 2**20)
    assert cli("runs", "--older-than", "1d").code == 2
    document = json.loads(cli("runs", "--prune", "--older-than", "1d", "--json").out)
    assert (document["schema"], document["runs"]) == ("topoplan.pruned/1", ["old-1"])
    assert document["freed_bytes"] > 3 * 2**20
    assert sorted(place.name for place in places.iterdir()) == ["new-1", "runs-1"]
    shown = cli("runs", "--prune").out
    assert shown.startswith("1 run forgotten, ")
    assert "- new-1" in shown
    assert cli("runs", "--prune").out == "No run is known to have ended as long ago.\n"
    assert [place.name for place in places.iterdir()] == ["runs-1"]


def test_what_runs_measured_stands_beside_what_was_predicted(cli: Cli) -> None:
    assert "No run has a measurement yet" in cli("runs", "--measured").out
    measured = Measurement(
        plan="tp8-pp1-dp4-mbs1",
        model="Qwen3-8B",
        steps=38,
        step_s=2.0,
        spread=0.01,
        predicted_step_s=1.5,
        band_s=(1.35, 1.65),
        reserved_bytes=40.0 * 2**30,
        predicted_reserved_bytes=41.0 * 2**30,
        memory_band=0.04,
    )
    make("a-1", "2030-01-02T08:30:00.000+00:00", state="ended", measurement=measured)
    make("b-2", "2030-01-02T09:30:00.000+00:00", state="failed")
    shown = cli("runs", "--measured").out
    assert " ".join(shown.splitlines()[2].split()) == "a-1 tp8-pp1-dp4-mbs1 38 2.00 s -25% 40.0 +2% step outside"
    assert [line for line in shown.splitlines() if "b-2" in line] == ["- b-2 has none: /b: no such file"]
    assert json.loads(cli("runs", "--json").out)["runs"][0]["measurement"]["step_s"] == 2.0


def test_says_of_each_run_why_it_measured_nothing(cli: Cli, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle_at(bundle)
    name = json.loads((bundle / "plan.json").read_text())["run"]
    make("a-1", "2030-01-02T08:30:00.000+00:00", state="ended")
    make("b-2", "2030-01-02T09:30:00.000+00:00", state="running")
    make("c-3", "2030-01-02T10:30:00.000+00:00", state="failed")
    for run in ("a-1", "c-3"):
        record.update(run, bundle=str(bundle), name=name)
    steps = [
        json.dumps({"current_steps": step, "total_steps": 60, "elapsed_time": f"0:00:{5 + step // 5:02d}"})
        for step in range(1, 61)
    ]
    made = record.load("a-1")
    made.log(made.nodes[0]).write_text("no step on this node\n")
    made.log(made.nodes[1]).write_text("\n".join(steps))
    why = (
        "its log has 49 steady steps after the first, which a clock of whole seconds times in 1 stretch of 10 s or"
        " more; expected 3 or more"
    )
    shown = " ".join(cli("runs", "--measured").out.split())
    assert f"- a-1 has none: {why} - b-2 has none: its end has not been seen here - c-3 has none: there is no" in shown
    asked = cli("calibrate", "--runs")
    assert asked.is_refused("no run tells of enough steps: run c-3 is left out: there is no copy of its log here; run")
    assert asked.is_refused(f"run a-1 is left out: {why}; see `topoplan runs --measured`, or give a LOG")


@pytest.mark.parametrize("verb", ["status", "logs", "attach", "stop"])
def test_verbs_of_one_run_name_the_ones_there_are(cli: Cli, verb: str) -> None:
    make("qwen-1", "2030-01-02T08:30:00.000+00:00")
    result = cli(verb, "qwen-7")
    assert (result.code, result.out) == (2, "")
    assert result.err == "topoplan: no run 'qwen-7'; did you mean 'qwen-1'?\n"


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


def recorded_and_asked(cli: Cli) -> list[tuple[str, int | None]]:
    """Return the state and code of the only run, from `runs` and from `runs status`."""
    (listed,) = json.loads(cli("runs", "--json").out)["runs"]
    asked = json.loads(cli("status", "--json").out)
    return [(one["state"], one["code"]) for one in (listed, asked)]


def test_tells_the_end_that_is_recorded_and_not_what_the_hosts_make_of_it(cli: Cli, live: LiveRun) -> None:
    live.start("exec sleep 610", "exit 1")
    live.wait_for(["running", "ended"])
    record.update("live-1", state="failed", code=1, left=("node-00",))
    assert recorded_and_asked(cli) == [("failed", 1), ("running", None)]  # what is left of it
    assert cli("stop").code == 0
    live.wait_for(["ended", "ended"])  # node-00 with the code of SIGTERM
    assert recorded_and_asked(cli) == [("failed", 1)] * 2
    assert cli("status").out.startswith("live-1: failed with exit code 1; made ")
    record.update("live-1", state="ended", code=0)
    with live.unreachable(1):
        assert recorded_and_asked(cli) == [("ended", 0)] * 2
        assert cli("status").out.startswith("live-1: ended; made ")


def test_a_run_that_was_stopped_is_stopped_for_status_too(cli: Cli, live: LiveRun) -> None:
    live.start("exec sleep 610", "exec sleep 620")
    assert cli("stop").code == 0
    live.wait_for(["ended", "ended"])
    assert recorded_and_asked(cli) == [("stopped", None)] * 2
    assert cli("status").out.startswith("live-1: stopped; made ")


def test_says_how_it_is_where_its_record_cannot_be_written(cli: Cli, live: LiveRun) -> None:
    live.start("exit 3", "exit 0")
    live.wait_for(["ended", "ended"])
    (live.record.directory() / ".lock").unlink()
    (live.record.directory() / ".lock").mkdir()  # prevents changes to the record, like a full disk
    shown = cli("status")
    assert shown.code == 0
    assert "ended with exit code 3" in shown.out
    assert "the record of the run cannot be written" in shown.err


def test_lines_of_several_nodes_begin_with_the_node(cli: Cli, live: LiveRun) -> None:
    live.start("echo a; printf b", "echo c >&2")
    live.wait_for(["ended", "ended"])
    shown = cli("logs")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == "[node-00] a\n[node-00] b\n[node-01] c\n"
    assert cli("logs", "--tail", "1").out == "[node-00] b\n[node-01] c\n"


def test_a_terminal_obeys_nothing_in_a_log_unless_it_is_asked_for_raw(
    live: LiveRun, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    live.start("printf '\\377\\000 \\033[31mred\\n10%%\\r20%%\\r\\nx'")
    live.wait_for(["ended"])
    from topoplan.cli.main import main

    def logs(*options: str) -> bytes:
        with pytest.raises(SystemExit) as stop:
            main(["logs", "--node", "0", *options])
        assert stop.value.code == 0
        return capfdbinary.readouterr().out

    assert logs() == logs("-f") == b"\\xff\\x00 red\n20%\nx\n"
    assert logs("--raw") == logs("--raw", "-f") == b"\xff\x00 \x1b[31mred\n10%\r20%\r\nx"


def test_follows_until_the_jobs_have_ended(cli: Cli, live: LiveRun) -> None:
    live.start("echo one; until [ -e go ]; do sleep 0.02; done; echo two; exit 3")
    live.wait_for_log(0, b"one\n")
    with live.host(0) as host:
        timer = threading.Timer(0.3, lambda: host.run(["touch", f"{live.record.nodes[0].run_dir}/go"], deadline_s=30))
        timer.start()
        shown = cli("logs", "-f", "--node", "0")
        timer.join()
    assert (shown.code, shown.out) == (0, "one\ntwo\n")


def test_follows_on_where_the_connection_is_lost(
    live: LiveRun, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topoplan.run.reachability.REPORT_AFTER_S", LIMIT_S)
    live.start("seq 5; printf '\\377\\r'; until [ -e go ]; do sleep 0.02; done; printf 'two'; exit 3")
    live.wait_for_log(0, b"1\n2\n3\n4\n5\n\xff\r")
    from topoplan.cli.main import main

    def break_off() -> None:
        wait_until(
            lambda: any(line.startswith("tail -c") for line in live.bed.processes("alpha").values()), "it follows"
        )
        live.bed.end_sessions("alpha")
        Path(live.record.nodes[0].run_dir, "go").touch()

    breaker = threading.Thread(target=break_off)
    breaker.start()
    with pytest.raises(SystemExit) as stop:
        main(["logs", "-f", "--node", "0", "--tail", "2", "--raw"])
    breaker.join()
    shown = capfdbinary.readouterr()
    assert (stop.value.code, shown.out, shown.err) == (0, b"5\n\xff\rtwo", b"")


def test_follows_several_nodes_by_whole_lines(cli: Cli, live: LiveRun) -> None:
    live.start("printf a; sleep 0.3; printf 'b\\nc'", "printf 1; sleep 0.2; printf '2\\n3'")
    shown = cli("logs", "-f")
    assert (shown.code, shown.err) == (0, "")
    assert sorted(shown.out.splitlines()) == ["[node-00] ab", "[node-00] c", "[node-01] 12", "[node-01] 3"]


def test_a_host_that_cannot_be_reached_is_shown_from_the_copy(cli: Cli, live: LiveRun) -> None:
    live.start("echo here", "echo there")
    live.wait_for(["ended", "ended"])
    with live.unreachable(1):
        shown = cli("logs")
        assert (shown.code, shown.out) == (1, "[node-00] here\n")
        assert "nothing listens on port 9" in shown.err
        assert "there is no copy of its log on this machine" in shown.err
        live.record.log(live.record.nodes[1]).write_bytes(b"old\ncopy\n")
        shown = cli("logs", "--tail", "1")
        assert (shown.code, shown.out) == (1, "[node-01] copy\n[node-00] here\n")
        assert "which may lack the end" in shown.err


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_a_node_that_was_never_started_has_none(cli: Cli, live: LiveRun, follow: tuple[str, ...]) -> None:
    shown = cli("logs", *follow, "--node", "1")
    assert (shown.code, shown.out) == (1, "")
    assert shown.err == "topoplan: node-01: no log on beta; its job was not started, or was removed\n"


def test_a_node_that_there_is_not(cli: Cli, live: LiveRun) -> None:
    shown = cli("logs", "--node", "2")
    assert (shown.code, shown.err) == (2, "topoplan: --node: no node 2 in run live-1; expected 0 to 1\n")


def shown_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("[")]


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 7), 7), ((5, 5), 5)])
def test_shows_all_nodes_and_ends_with_the_runs_code(
    cli: Cli, live: LiveRun, codes: tuple[int, int], expected: int
) -> None:
    live.start(*(f"echo {code}; exit {code}" for code in codes))
    live.wait_for(["ended", "ended"])
    shown = cli("attach")
    assert shown.code == expected
    assert sorted(shown_lines(shown.out)) == [f"[node-{node:02d}] {code}" for node, code in enumerate(codes)]
    noted = record.load()
    assert (noted.state, noted.code) == ("failed" if expected else "ended", expected)
    assert [node.code for node in noted.nodes] == list(codes)


def test_a_node_that_never_started_is_named(cli: Cli, live: LiveRun) -> None:
    live.start("exit 0")
    shown = cli("attach")
    assert shown.code == 1
    assert f"node-01 ({live.record.nodes[1].address}) failed first: was never started\n" in shown.err


def test_ctrl_c_leaves_the_run_as_it_is(live: LiveRun) -> None:
    live.start("echo up; exec sleep 610", "echo up; exec sleep 620")
    command = [sys.executable, "-m", "topoplan", "attach", "live"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert {process.stdout.readline(), process.stdout.readline()} == {b"[node-00] up\n", b"[node-01] up\n"}
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert said.decode().endswith(
        "  topoplan runs attach live-1  # watch it again\n"
        "  topoplan runs stop live-1    # end what is left\n"
        "topoplan: left; the run goes on\n"
    )
    live.wait_for(["running", "running"])


def test_json_has_an_event_a_line_and_the_end(cli: Cli, live: LiveRun) -> None:
    live.start("echo one", "echo boom; exit 4")
    live.wait_for(["ended", "ended"])
    rows = [json.loads(line) for line in cli("attach", "--json").out.splitlines()]
    assert {row["schema"] for row in rows} == {"topoplan.attach/1"}
    assert {"schema": "topoplan.attach/1", "event": "line", "node": "node-01", "text": "boom"} in rows
    end = rows[-1]
    assert (end["event"], end["end"], end["code"], end["running"]) == ("end", "failed", 4, [])
    assert (end["failure"]["node"], end["failure"]["lines"]) == ("node-01", ["boom"])


def test_where_training_is_stands_beside_what_the_bundle_predicted(cli: Cli, live: LiveRun, tmp_path: Path) -> None:
    spec, plan = make_spec_and_plan()
    write_bundle(generate(spec, predict(spec, plan.layout)), tmp_path / "bundle")
    run = json.loads((tmp_path / "bundle" / "plan.json").read_text())["run"]
    record.update(live.record.run_id, bundle=str(tmp_path / "bundle"), name=run)
    bars = "".join(rf"\r  {step}%%|#| {step}/100 [00:{step:02d}<01:00, 1.00s/it]" for step in range(60))
    live.start(f"printf '{bars}\\n'", "exit 0")
    live.wait_for(["ended", "ended"])
    shown = cli("attach")
    assert (shown.code, "no prediction" in shown.err) == (0, False)
    assert "step 59/100" in shown.out
    record.update(live.record.run_id, name="another")
    assert "no prediction to compare with: " in cli("attach").err


def test_a_host_that_cannot_be_reached_hides_none_of_the_others(cli: Cli, live: LiveRun) -> None:
    live.start("echo here; sleep 0.2", "echo there")
    live.wait_for_log(0, b"here\n")
    with live.unreachable(1):
        shown = cli("attach", "--lost-host-after", "6s")
    assert (shown.code, shown_lines(shown.out)) == (1, ["[node-00] here"])
    assert "how node-01 is, is not known: " in shown.err
    assert record.load().state == "running"


def test_only_the_last_lines_of_the_past_are_shown_and_all_are_copied(cli: Cli, live: LiveRun) -> None:
    live.start("seq 1000; printf 'no end'", "exit 0")
    live.wait_for(["ended", "ended"])
    shown = cli("attach", "--tail", "3")
    assert shown_lines(shown.out) == ["[node-00] 999", "[node-00] 1000", "[node-00] no end"]
    copy = live.record.log(live.record.nodes[0])
    assert copy.read_text() == "".join(f"{number}\n" for number in range(1, 1001)) + "no end"
    assert shown_lines(cli("attach", "--tail", "0").out) == []


def test_what_still_runs_after_a_failure_is_stopped_unless_asked_not_to(
    cli: Cli, live: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from topoplan.run.settings import Settings

    monkeypatch.setattr("topoplan.run.settings.Settings", lambda **given: Settings(linger_s=0.3, **given))
    live.start("echo up; exec sleep 610", "echo No space left on device; exit 9")
    live.wait_for(["running", "ended"])
    shown = cli("attach", "--no-stop-on-failure")
    assert shown.code == 9
    assert f"node-01 ({live.record.nodes[1].address}) failed first: ended with exit code 9\n" in shown.err
    assert "likely cause: " in shown.err
    assert "node-00 still runs, though the run cannot succeed any more\n" in shown.err
    assert "topoplan runs stop live-1" in shown.err
    live.wait_for(["running"])
    assert record.load().state == "running"
    shown = cli("attach", "--grace", "1")
    assert shown.code == 9
    assert shown.err.endswith("nothing of the run is left running\n")
    live.wait_for(["ended"])
    noted = record.load()
    assert (noted.state, noted.code, noted.reason) == ("failed", 9, "node-01: ended with exit code 9")
    assert "topoplan: this run failed earlier: node-01: ended with exit code 9\n" in cli("attach").err


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


def test_of_the_newest_run_names_older_ones_that_are_not_known_to_have_ended(cli: Cli, live: LiveRun) -> None:
    make("older-1", "2029-01-01T10:00:00.000+00:00", state="running")
    make("older-2", "2029-01-02T10:00:00.000+00:00", state="failed", left=("node-01",))
    make("older-3", "2029-01-03T10:00:00.000+00:00", state="failed")
    record.update("live-1", state="failed")
    shown = cli("stop")
    assert shown.code == 0
    assert shown.err == (
        "topoplan: not known to have ended: older-2, older-1; `topoplan runs stop older-2` ends that one\n"
    )
    assert cli("stop", "live-1").err == ""


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
