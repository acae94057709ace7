from __future__ import annotations

import json

from topoplan.errors import HostError
from topoplan.report.attach import attached_lines, attached_to_dict, event_to_dict
from topoplan.run.attach import Attached
from topoplan.run.events import Event
from topoplan.run.failure import Failure

LOST = HostError("no answer", host="gpu3", problem="timeout", remedy="check the machine")
FAILURE = Failure(node="node-01", host="10.0.0.2", what="ended with exit code 7", code=7)
WHAT_TO_DO = "  topoplan status a-run    topoplan attach a-run    topoplan stop a-run"


def lines(attached: Attached) -> list[str]:
    return list(attached_lines(attached))


def test_a_good_end_and_leaving_take_a_line_or_two() -> None:
    assert lines(Attached(end="ended", code=0, run="a-run")) == ["topoplan: run a-run has ended well"]
    assert lines(Attached(end="stopped", code=143, run="a-run")) == ["topoplan: run a-run was stopped"]
    still = lines(Attached(end="stopped", code=143, run="a-run", running=("node-01",)))
    assert still[:2] == ["topoplan: run a-run is being stopped", "topoplan: node-01 still runs"]
    assert lines(Attached(end="left", code=130, run="a-run", running=("node-00",))) == [
        "topoplan: left; the run goes on",
        "  watch it again: topoplan attach a-run    end it: topoplan stop a-run",
    ]


def test_what_still_runs_after_a_failure_is_said_with_how_to_stop_it() -> None:
    failed = Attached(end="failed", code=7, run="a-run", failure=FAILURE, running=("node-00", "node-02"))
    assert lines(failed) == [
        "topoplan: node-01 (10.0.0.2) failed first: ended with exit code 7",
        "topoplan: node-00, node-02 still run, though the run cannot succeed any more",
        WHAT_TO_DO,
    ]
    assert lines(Attached(end="failed", code=7, run="a-run", failure=FAILURE))[-1] == (
        "topoplan: nothing of the run is left running"
    )


def test_a_host_that_cannot_be_asked_is_named() -> None:
    unknown = Attached(end="unknown", code=1, run="a-run", errors={"node-03": LOST}, running=("node-03",))
    assert lines(unknown) == [
        "topoplan: how node-03 is, is not known: gpu3: no answer; check the machine",
        WHAT_TO_DO,
    ]


def test_events_and_the_end_are_json_of_one_schema() -> None:
    failed = Attached(end="failed", code=7, run="a-run", failure=FAILURE, errors={"node-03": LOST}, running=("n",))
    end = json.loads(json.dumps(attached_to_dict(failed)))
    assert (end["schema"], end["event"], end["end"], end["code"]) == ("topoplan.attach/1", "end", "failed", 7)
    assert (end["failure"]["node"], end["errors"]["node-03"]["problem"], end["running"]) == (
        "node-01",
        "timeout",
        ["n"],
    )
    line = event_to_dict(Event(kind="line", node="node-00", text="hello"))
    assert line == {"schema": "topoplan.attach/1", "event": "line", "node": "node-00", "text": "hello"}
