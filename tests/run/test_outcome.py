import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from topoplan.errors import HostError
from topoplan.run import record
from topoplan.run.node import NodeState
from topoplan.run.outcome import exit_code, grace_of_stop_s, record_end_of, record_stop_request
from topoplan.run.record import NodeRecord, RunRecord

ENDED = NodeState(state="ended", code=0)
FAILED = NodeState(state="ended", code=7)
GONE = NodeState(state="gone")
LOST = HostError("x", host="b", problem="lost")


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def created(count: int = 1, run_id: str = "r-1", **changes: Any) -> RunRecord:
    """Create the record of a run on so many hosts."""
    nodes = tuple(NodeRecord(node=n, name="h", address="h", run_dir="/r", script="s") for n in range(count))
    made = RunRecord(run_id=run_id, name="r", bundle="/b", created=record.now_text(), nodes=nodes)
    record.create(replace(made, **changes))
    return record.load(run_id)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([ENDED, ENDED], 0),
        ([ENDED, FAILED], 7),
        ([NodeState(state="ended", code=137), FAILED], 137),
        ([GONE, FAILED], 1),
        ([ENDED, NodeState(state="rebooted")], 1),
        ([FAILED, NodeState(state="running")], None),
        ([FAILED, NodeState(state="never-started")], None),
        ([FAILED, LOST], None),
    ],
)
def test_a_run_has_a_code_once_all_its_nodes_have_ended(states: list[NodeState | HostError], code: int | None) -> None:
    assert exit_code({str(number): state for number, state in enumerate(states)}) == code


def ended(code: int, ago_s: float | None, stopped: str = "") -> NodeState:
    return NodeState(state="ended", code=code, ended_s_ago=ago_s, stopped=stopped)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([ended(143, 60), ended(1, 65)], 1),  # a launch stopped node-00, and was killed before it could note the end
        ([ended(143, 66), ended(1, 65)], 1),  # clocks have whole seconds
        ([ended(143, None), ended(1, None)], 1),
        ([ended(143, 65), ended(1, 60)], 143),  # somebody ended node-00, for which node-01 failed
        ([ended(0, 99), ended(9, 60), ended(7, 61)], 7),
        ([ended(1, 65, "node-01 failed"), ended(9, 60)], 9),
    ],
)
def test_the_code_is_that_of_the_node_that_failed_first(states: list[NodeState], code: int) -> None:
    assert exit_code({str(number): state for number, state in enumerate(states)}) == code


def test_an_end_is_noted_once_and_only_when_all_nodes_were_asked() -> None:
    made = created(2)
    assert record_end_of(made, {"node-00": ENDED}) == made
    assert record_end_of(made, {"node-00": ENDED, "node-01": LOST}) == made
    over = record_end_of(made, {"node-00": ENDED, "node-01": FAILED})
    assert (over.state, over.code) == ("failed", 7)
    assert record.load() == over
    assert record_end_of(over, {"node-00": ENDED, "node-01": ENDED}) == over


def test_what_ends_because_a_stop_was_asked_for_that_nobody_finished_was_stopped() -> None:
    created()
    record_stop_request("r-1", 10.0)
    assert record_end_of(record.load(), {"node-00": NodeState(state="ended", code=143)}).state == "stopped"


@pytest.mark.parametrize(
    ("asked_s_ago", "ended_s_ago", "code", "state"),
    [
        (3600, 3590, 1, "stopped"),
        (3600, 10, 1, "failed"),
        (10, 3600, 1, "failed"),
        (3600, None, 1, "stopped"),
        (3600, 3590, 0, "stopped"),  # a trainer that answers SIGTERM with a checkpoint and a good end
        (3600, 10, 0, "ended"),
        (10, 3600, 0, "ended"),
    ],
)
def test_a_stop_is_to_blame_for_what_ends_soon_after_it(
    asked_s_ago: float, ended_s_ago: int | None, code: int, state: str
) -> None:
    asked = datetime.fromtimestamp(time.time() - asked_s_ago, UTC).isoformat()
    created(stop_asked=asked)
    ended = NodeState(state="ended", code=code, ended_s_ago=ended_s_ago) if ended_s_ago is not None else GONE
    assert record_end_of(record.load(), {"node-00": ended}).state == state


def test_who_asks_how_a_run_is_changes_no_end_that_its_launch_has_noted_meanwhile() -> None:
    before = created(2)
    over = record.update("r-1", state="failed", code=7, reason="node-01: ended with exit code 7")
    stopped = NodeState(state="ended", code=143)
    assert record_end_of(before, {"node-00": stopped, "node-01": FAILED}) == over == record.load()


def test_who_asks_to_stop_a_run_is_to_blame_for_what_ends_after_that() -> None:
    assert grace_of_stop_s("r-1", time.monotonic()) is None
    record_stop_request("r-1", 10.0)
    created(0)
    assert grace_of_stop_s("r-1", time.monotonic()) is None
    before = time.monotonic() - 0.01
    record_stop_request("r-1", 300)
    asked = record.load().stop_asked
    after = time.monotonic() + 0.01
    assert (grace_of_stop_s("r-1", before), grace_of_stop_s("r-1", after)) == (None, 300)
    record_stop_request("r-1", 0.0)
    assert (record.load().stop_asked, record.load().stop_grace_s) == (asked, 300)
    record_stop_request("r-1", 400.0)
    assert record.load().stop_asked == asked
    assert 400 <= record.load().stop_grace_s < 500
    record.update("r-1", stop_asked="2020-01-01T00:00:00.000+00:00", stop_grace_s=10.0)
    assert grace_of_stop_s("r-1", time.monotonic()) is None
    record_stop_request("r-1", 5.0)
    assert grace_of_stop_s("r-1", time.monotonic() + 0.01) == 5.0
    created(0, "r-2", state="failed")
    record_stop_request("r-2", 10.0)
    assert record.load("r-2").stop_asked is None
