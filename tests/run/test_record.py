import json
import math
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import fill_disk, small_disk
from topoplan.errors import InputError, OutputError
from topoplan.run import record
from topoplan.run.record import NodeRecord, RunRecord, Started, Unreadable


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "topoplan" / "runs"


STARTED = Started(pid=7, session=7, start_ticks=100, boot_id="b-1", unix_s=1)


def a_run(run_id: str = "qwen-1", created: str = "2030-01-01T00:00:00.000+00:00", **changes: Any) -> RunRecord:
    nodes = tuple(
        NodeRecord(
            node=number,
            name=name,
            address=name,
            user="me",
            port=2222,
            run_dir=f"/w/{run_id}",
            script="n.sh",
            started=started,
        )
        for number, (name, started) in enumerate((("a", STARTED), ("b", None)))
    )
    return RunRecord(run_id=run_id, name="qwen", bundle="/b", created=created, nodes=nodes, **changes)


def edited(state: Path, run_id: str, /, **changes: Any) -> None:
    path = state / run_id / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_made_is_what_is_loaded() -> None:
    made = a_run(ssh_config="/c", reason="é\n")
    record.create(made)
    assert record.load("qwen-1") == made
    assert made.nodes[1].host.address == "b"
    assert made.nodes[1].label == "node-01"


def test_only_the_user_can_read_it(state: Path) -> None:
    os.umask(os.umask(0))
    directory = record.create(a_run())
    assert directory == state / "qwen-1"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "run.json").stat().st_mode) == 0o600
    record.update("qwen-1", state="running")
    assert stat.S_IMODE((directory / "run.json").stat().st_mode) == 0o600


def test_the_place_is_the_users_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert record.runs_directory() == tmp_path / ".local" / "state" / "topoplan" / "runs"


def test_an_id_is_good_as_a_file_name_and_no_other_run_has_it() -> None:
    ids = {record.new_run_id("Qwen/Qwen3-VL 8B é$(id)") for _ in range(50)}
    assert len(ids) > 45
    for run_id in ids:
        assert run_id.startswith("qwen-qwen3-vl-8b-id-20")
        record.create(a_run(run_id))
    assert record.new_run_id("///").startswith("run-")


def test_an_id_that_leads_elsewhere_is_a_mistake_of_the_caller() -> None:
    for run_id in ("../x", "", ".", "a/b", "-n", "x" * 200):
        with pytest.raises(ValueError, match="not the id of a run"):
            record.create(a_run(run_id))


def test_a_run_is_not_made_twice() -> None:
    record.create(a_run())
    with pytest.raises(OutputError, match="File exists"):
        record.create(a_run())


class TestFindingOne:
    @pytest.fixture(autouse=True)
    def _some(self) -> None:
        record.create(a_run("qwen-30", "2030-01-03T00:00:00.000+00:00"))
        record.create(a_run("qwen-3", "2030-01-01T00:00:00.000+00:00"))
        record.create(a_run("llama-1", "2030-01-02T00:00:00.000+00:00"))

    @pytest.mark.parametrize(
        ("reference", "run_id"),
        [
            ("last", "qwen-30"),
            ("qwen-3", "qwen-3"),
            ("qwen-30", "qwen-30"),
            ("l", "llama-1"),
            ("llama-1", "llama-1"),
            ("-1", "llama-1"),
        ],
    )
    def test_by_id_a_part_of_it_or_time(self, reference: str, run_id: str) -> None:
        assert record.load(reference).run_id == run_id

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            ("q", r"^2 runs have 'q' in their id: qwen-3, qwen-30; give more of the id$"),
            ("qwen-4", r"^no run 'qwen-4'; did you mean 'qwen-3'\?$"),
            ("zzz", r"^no run 'zzz'; see `topoplan runs`$"),
            ("../runs/qwen-3", "^no run"),
            ("", "^no run"),
        ],
    )
    def test_or_one_message(self, reference: str, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            record.load(reference)
        assert caught.value.exit_code == 2

    def test_all_come_by_time(self) -> None:
        assert [run.run_id for run in record.runs()] == ["qwen-3", "llama-1", "qwen-30"]


def test_without_any_run_the_message_says_how_to_start_one() -> None:
    assert record.runs() == []
    with pytest.raises(InputError, match="there are no runs; start one with `topoplan launch`"):
        record.load()


class TestARecordThatCannotBeUsed:
    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", '"x"', '{"schema": "topoplan.run/1"}', "\x00\xff", "[" * 100_000, '{"run_id": "bad"}'],
    )
    def test_is_named_and_hides_no_other(self, state: Path, text: str) -> None:
        record.create(a_run())
        (state / "bad").mkdir()
        (state / "bad" / "run.json").write_text(text)
        assert record.runs() == [a_run(), Unreadable(run_id="bad", why="damaged: not a record of a run")]
        assert record.load().run_id == "qwen-1"
        with pytest.raises(InputError, match=r"bad/run\.json: damaged: not a record of a run; remove its directory"):
            record.load("bad")

    @pytest.mark.parametrize(
        "change",
        [
            {"nodes": [{"node": "0"}]},
            {"nodes": [{}]},
            {"nodes": {}},
            {"nodes": [{"node": 0, "name": "a", "address": "a", "run_dir": "/w", "script": "n", "started": {}}]},
            {"nodes": [{"node": 0, "name": "a", "address": "a", "run_dir": "/w", "script": "n", "started": [1]}]},
            {"code": "0"},
            {"code": True},
            {"state": "flying"},
            {"created": "yesterday"},
            {"run_id": "other"},
            {"ended": 3},
            {"stop_grace_s": math.nan},
            {"stop_grace_s": math.inf},
            {"stop_grace_s": "10"},
        ],
    )
    def test_has_values_of_another_kind(self, state: Path, change: dict[str, Any]) -> None:
        record.create(a_run())
        edited(state, "qwen-1", **change)
        with pytest.raises(InputError, match="damaged"):
            record.load("qwen-1")

    def test_was_written_by_a_newer_version(self, state: Path) -> None:
        record.create(a_run())
        edited(state, "qwen-1", schema="topoplan.run/2", nodes="other")
        with pytest.raises(InputError, match=r"another version of topoplan: 'topoplan\.run/2'; expected"):
            record.load("qwen-1")
        with pytest.raises(InputError, match="no record can be read"):
            record.load()
        with pytest.raises(InputError, match="another version"):
            record.update("qwen-1", code=0)

    def test_is_not_there(self, state: Path) -> None:
        (state / "empty").mkdir(parents=True)
        (state / "a-file").touch()
        assert record.runs() == [Unreadable(run_id="empty", why="no record in it")]


def test_keys_of_a_later_release_with_the_same_schema_are_passed_over(state: Path) -> None:
    record.create(a_run())
    edited(state, "qwen-1", colour="red")
    assert record.load() == a_run()


def test_changes_are_in_the_file_and_nothing_else_changes(state: Path) -> None:
    record.create(a_run())
    assert record.update("qwen-1", state="failed", code=3) == a_run(state="failed", code=3) == record.load()
    assert sorted(path.name for path in (state / "qwen-1").iterdir()) == [".lock", "run.json"]
    with pytest.raises(InputError, match="no run 'absent'"):
        record.update("absent", code=0)
    assert not (state / "absent").exists()


def test_a_known_end_stays_for_who_knows_less() -> None:
    record.create(a_run())
    assert record.update("qwen-1", unless_over=True, state="running").state == "running"
    record.update("qwen-1", state="failed", code=8)
    assert record.update("qwen-1", unless_over=True, state="stopped").code == 8
    assert record.load().state == "failed"


def test_changes_at_the_same_time_all_arrive(state: Path) -> None:
    record.create(a_run(reason=""))
    code = (
        "from topoplan.run import record\n"
        "import sys\n"
        "for number in range(20):\n"
        "    if sys.argv[1] == 'code': record.update('qwen-1', code=number)\n"
        "    else: record.update('qwen-1', reason=str(number))\n"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code, which]) for which in ("code", "reason")]
    assert [job.wait() for job in jobs] == [0, 0]
    assert record.load() == a_run(code=19, reason="19")


def test_a_place_that_cannot_be_written_is_one_message(state: Path) -> None:
    state.parent.parent.mkdir(parents=True)
    state.parent.write_text("a file")
    with pytest.raises(
        OutputError, match="the record of the run cannot be written: Not a directory; set XDG_STATE_HOME"
    ):
        record.create(a_run())


def test_a_process_that_was_killed_while_it_wrote_leaves_nothing_that_stays(state: Path) -> None:
    record.create(a_run())
    (state / "qwen-1" / ".run-new").write_text("{")
    record.update("qwen-1", state="running")
    assert sorted(path.name for path in (state / "qwen-1").iterdir()) == [".lock", ".reserve", "run.json"]


@pytest.fixture
def full(state: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that fills the disk with the records."""
    state.mkdir(parents=True)
    with small_disk(state, "size=256k"):
        yield lambda: fill_disk(state)


class TestAFullDisk:
    def test_of_a_new_run_is_one_message_and_leaves_no_record(self, state: Path, full: Callable[[], None]) -> None:
        full()
        with pytest.raises(OutputError, match="the record of the run cannot be written: No space left on device"):
            record.create(a_run())
        assert record.runs() == []

    @pytest.mark.parametrize("end", ["ended", "failed", "stopped"])
    def test_at_the_end_of_a_run_is_told_in_its_record(self, state: Path, full: Callable[[], None], end: Any) -> None:
        record.create(a_run())
        full()
        with pytest.raises(OutputError, match="No space left on device"):
            record.update("qwen-1", state="running")
        assert record.load().state == "starting"
        noted = record.update("qwen-1", state=end, code=3, trouble="a log is not kept")
        assert noted == record.load()
        assert (noted.state, noted.code) == (end, 3)
        assert noted.trouble == "a log is not kept; the disk of this machine was full when the run ended"

    def test_has_room_for_the_end_of_a_run_of_a_thousand_nodes(self, state: Path, full: Callable[[], None]) -> None:
        subprocess.run(["mount", "-o", "remount,size=4m", state], check=True)
        nodes = tuple(replace(a_run().nodes[0], node=node, name="n" * 20) for node in range(1000))
        record.create(replace(a_run(), nodes=nodes))
        full()
        ended = tuple(replace(node, code=137) for node in nodes)
        assert record.update("qwen-1", state="failed", nodes=ended).nodes == ended == record.load().nodes
