import json
from dataclasses import replace
from pathlib import Path

import pytest

from topoplan.errors import HostError
from topoplan.report.session import (
    ATTACH,
    LAUNCH,
    attach_lines,
    event_text,
    event_to_json,
    failure_lines,
    failure_to_dict,
    launch_lines,
    outcome_to_dict,
)
from topoplan.run.diagnose import Diagnosis
from topoplan.run.events import Event
from topoplan.run.failure import Failure
from topoplan.run.record import Attempt
from topoplan.run.session import Outcome

LOST = HostError("no answer", host="gpu3", problem="timeout", remedy="check the machine")
FAILURE = Failure(node="node-01", host="10.0.0.2", what="ended with exit code 7", code=7)
DIAGNOSIS = Diagnosis(
    node=1,
    rank=9,
    kind="gpu-memory",
    cause="out of memory",
    remedy="take a smaller micro batch",
    evidence=("OOM",),
    certain=False,
)
DIAGNOSED = Failure(
    node="node-01",
    host="10.0.0.2",
    what="ended with exit code 7",
    code=7,
    diagnosis=DIAGNOSIS,
    tail=tuple(f"line {number}" for number in range(30)),
    log=Path("/state/a-run/node-01.log"),
)
FAILED = Outcome(
    end="failed",
    code=7,
    run="a-run",
    failure=replace(DIAGNOSED, diagnosis=replace(DIAGNOSIS, certain=True)),
)
WHAT_TO_DO = [
    "  topoplan runs status a-run  # ask how it is",
    "  topoplan runs attach a-run  # watch it again",
    "  topoplan runs stop a-run    # end what is left",
]


def text(outcome: Outcome) -> str:
    return "\n".join(launch_lines(outcome))


def lines(outcome: Outcome) -> list[str]:
    return list(attach_lines(outcome))


def test_a_failure_names_node_host_and_rank_and_gives_last_lines_cause_and_remedy() -> None:
    said = text(FAILED)
    assert "node-01 (10.0.0.2), rank 9 failed first: ended with exit code 7" in said
    assert "line 29" in said
    assert "line 9\n" not in said
    assert "likely cause: out of memory\n  what to do: take a smaller micro batch" in said
    assert "whole logs: /state/a-run" in said
    assert "nothing of the run is left running" in said


def test_what_could_not_be_stopped_is_said_with_how_to_finish() -> None:
    outcome = Outcome(end="interrupted", code=130, run="a-run", errors={"node-03": LOST}, running=("node-03",))
    said = text(outcome)
    assert "interrupted" in said
    assert "node-03 could not be stopped, and may run on: gpu3: no answer; check the machine" in said
    assert "topoplan runs stop a-run" in said
    assert "nothing of the run is left" not in said


def test_a_run_of_which_nothing_is_seen_any_more_is_not_said_to_have_ended() -> None:
    said = text(Outcome(end="unknown", code=1, run="a-run", errors={"node-03": LOST}, running=("node-03",)))
    assert said.startswith("topoplan: all hosts were unreachable for too long (gpu3: no answer; check the machine);")
    assert "stopped" not in said
    assert "topoplan runs attach a-run" in said


def test_other_ends_take_a_line_or_two() -> None:
    assert text(Outcome(end="ended", code=0, run="a-run")) == "topoplan: run a-run has ended well"
    assert text(Outcome(end="stopped", code=143, run="a-run")) == "topoplan: run a-run was stopped"
    assert "topoplan runs attach a-run" in text(Outcome(end="detached", code=0, run="a-run"))
    assert text(Outcome(end="interrupted", code=130)) == "topoplan: interrupted"
    assert text(Outcome(end="interrupted", code=130, run="a-run")) == "topoplan: stopped"
    assert text(Outcome(end="refused", code=1, errors={"node-00": LOST})) == "topoplan: nothing was put on any host"
    failed = Outcome(end="failed", code=1, run="a-run", errors={"node-00": LOST})
    assert "nothing was started" in text(failed)


def test_of_watching_a_good_end_and_leaving_take_a_line_or_two() -> None:
    assert lines(Outcome(end="ended", code=0, run="a-run")) == ["topoplan: run a-run has ended well"]
    assert lines(Outcome(end="stopped", code=143, run="a-run")) == ["topoplan: run a-run was stopped"]
    still = lines(Outcome(end="stopped", code=143, run="a-run", running=("node-01",)))
    assert still[:2] == ["topoplan: run a-run is being stopped", "topoplan: node-01 still runs"]
    assert lines(Outcome(end="left", code=130, run="a-run", running=("node-00",))) == [
        *WHAT_TO_DO[1:],
        "topoplan: left; the run goes on",
    ]


def test_what_still_runs_after_a_failure_is_said_with_how_to_stop_it() -> None:
    failed = Outcome(end="failed", code=7, run="a-run", failure=FAILURE, running=("node-00", "node-02"))
    assert lines(failed) == [
        "topoplan: node-01 (10.0.0.2) failed first: ended with exit code 7",
        "topoplan: node-00, node-02 still run, though the run cannot succeed any more",
        *WHAT_TO_DO,
    ]
    assert lines(Outcome(end="failed", code=7, run="a-run", failure=FAILURE))[-1] == (
        "topoplan: nothing of the run is left running"
    )


def test_a_host_that_cannot_be_asked_is_named() -> None:
    unknown = Outcome(end="unknown", code=1, run="a-run", errors={"node-03": LOST}, running=("node-03",))
    assert lines(unknown) == [
        "topoplan: how node-03 is, is not known: gpu3: no answer; check the machine",
        *WHAT_TO_DO,
    ]


@pytest.mark.parametrize("schema", [LAUNCH, ATTACH])
def test_events_and_the_end_are_json_of_one_schema(schema: str) -> None:
    failed = replace(FAILED, errors={"node-03": LOST}, running=("node-03",))
    end = json.loads(json.dumps(outcome_to_dict(failed, schema)))
    assert (end["schema"], end["event"], end["end"], end["code"]) == (schema, "end", "failed", 7)
    assert (end["failure"]["rank"], end["failure"]["kind"], len(end["failure"]["lines"])) == (9, "gpu-memory", 20)
    assert (end["errors"]["node-03"]["problem"], end["running"]) == ("timeout", ["node-03"])
    lines = event_to_json(Event(kind="output", node="node-00", text='hello\n"you"'), schema).split("\n")
    line = {"schema": schema, "event": "line", "node": "node-00"}
    assert [json.loads(text) for text in lines] == [line | {"text": "hello"}, line | {"text": '"you"'}]
    note = json.loads(event_to_json(Event(kind="note", text="mind", data={"pids": [1]}), schema))
    assert note == {"schema": schema, "event": "note", "node": None, "text": "mind", "pids": [1]}


def test_a_line_for_a_person_begins_with_who_says_it() -> None:
    assert event_text(Event(kind="output", node="node-00", text="hello\nyou")) == "[node-00] hello\n[node-00] you"
    assert event_text(Event(kind="note", text="mind")) == "topoplan: mind"


def test_attempts_are_told_with_what_they_cost_and_the_host_that_failed_more_than_once() -> None:
    first = Attempt(ended="", node="node-01", host="10.0.0.2", reason="node-01: was lost", last_step=620)
    last = replace(first, reason="node-01: a rank was killed", first_step=600, last_step=None)
    ended = Outcome(end="ended", code=0, run="a-run", attempts=(first, last), lost_steps=20)
    assert list(launch_lines(ended)) == [
        "topoplan: run a-run was started 3 times; 20 steps had to be done again",
        "  1: node-01: was lost (10.0.0.2), at step 620",
        "  2: node-01: a rank was killed (10.0.0.2)",
        "topoplan: 10.0.0.2 failed first 2 times: see to its machine, or leave it out of the spec",
        "topoplan: run a-run has ended well",
    ]
    once = replace(FAILED, attempts=(replace(first, host="10.0.0.9"),))
    assert "no step was lost" in text(once)
    assert "failed first 2 times" not in text(once)


def test_names_node_host_and_rank_and_gives_last_lines_cause_and_remedy() -> None:
    lines = list(failure_lines(DIAGNOSED))
    assert lines[:3] == [
        "topoplan: node-01 (10.0.0.2), rank 9 failed first: ended with exit code 7",
        "  its last lines:",
        "    line 10",
    ]
    assert lines[-4:] == [
        "    line 29",
        "  likely cause: out of memory, though it may be the consequence of something else",
        "  what to do: take a smaller micro batch",
        "  whole logs: /state/a-run",
    ]


def test_of_what_left_no_trace_only_the_end_is_known() -> None:
    failure = Failure(node="node-00", host="a", what="was never started")
    assert list(failure_lines(failure)) == ["topoplan: node-00 (a) failed first: was never started"]
    assert failure_to_dict(failure)["cause"] is None


def test_programs_get_the_same() -> None:
    found = json.loads(json.dumps(failure_to_dict(DIAGNOSED)))
    assert (found["node"], found["code"], found["rank"], found["kind"]) == ("node-01", 7, 9, "gpu-memory")
    assert (len(found["lines"]), found["evidence"]) == (20, ["OOM"])
