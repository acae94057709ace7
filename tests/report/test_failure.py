import json
from pathlib import Path

from topoplan.report.failure import failure_lines, failure_to_dict
from topoplan.run.diagnose import Diagnosis
from topoplan.run.failure import Failure

DIAGNOSIS = Diagnosis(
    node=1,
    rank=9,
    kind="gpu-memory",
    cause="out of memory",
    remedy="take a smaller micro batch",
    evidence=("OOM",),
    certain=False,
)
FAILURE = Failure(
    node="node-01",
    host="10.0.0.2",
    what="ended with exit code 7",
    code=7,
    diagnosis=DIAGNOSIS,
    tail=tuple(f"line {number}" for number in range(30)),
    log=Path("/state/a-run/node-01.log"),
)


def test_names_node_host_and_rank_and_gives_last_lines_cause_and_remedy() -> None:
    lines = list(failure_lines(FAILURE))
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
    found = json.loads(json.dumps(failure_to_dict(FAILURE)))
    assert (found["node"], found["code"], found["rank"], found["kind"]) == ("node-01", 7, 9, "gpu-memory")
    assert (len(found["lines"]), found["evidence"]) == (20, ["OOM"])
