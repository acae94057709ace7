import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
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
    assert "b-2" not in shown
    assert json.loads(cli("runs", "--json").out)["runs"][0]["measurement"]["step_s"] == 2.0


@pytest.mark.parametrize("verb", ["status", "logs", "attach", "stop"])
def test_verbs_of_one_run_name_the_ones_there_are(cli: Cli, verb: str) -> None:
    make("qwen-1", "2030-01-02T08:30:00.000+00:00")
    result = cli(verb, "qwen-7")
    assert (result.code, result.out) == (2, "")
    assert result.err == "topoplan: no run 'qwen-7'; did you mean 'qwen-1'?\n"
