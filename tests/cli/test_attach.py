import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bundle.samples import make_spec_and_plan
from tests.cli.conftest import Cli
from tests.cli.live_run import LiveRun
from tests.waiting import LIMIT_S
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.planner.predict import predict
from topoplan.run import record


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
