from __future__ import annotations

from collections import deque
from pathlib import Path

from topoplan.errors import HostError
from topoplan.launch.failure import first_failure
from topoplan.launch.node import NodeState, State
from topoplan.launch.watch import Watched


def node(number: int, *lines: str, code: int | None = None, state: State = "ended", at: float = 0.0) -> Watched:
    """A node as a watch leaves it."""
    name = f"node-{number:02d}"
    made = Watched(node=number, name=name, address=f"gpu{number}", run_dir="", connection=None, log=Path(f"/l/{name}"))
    made.tail = deque(lines)
    made.state = NodeState(state=state, code=code)
    if state != "running":
        made.ended, made.code, made.trouble_at = True, code, at
        made.failure = f"ended with exit code {code}" if code != 0 else ""
    return made


def test_there_is_none_while_no_node_has_failed() -> None:
    assert first_failure([node(0, code=0), node(1, state="running")], ranks_per_node=8) is None


def test_of_ends_that_explain_as_little_the_earliest_counts() -> None:
    found = first_failure([node(0, "x", code=3, at=2.0), node(1, "y", code=4, at=1.0)], ranks_per_node=8)
    assert found is not None
    failure, code = found
    assert (failure.node, failure.host, failure.code, failure.tail, code) == ("node-01", "gpu1", 4, ("y",), 4)
    assert failure.reason == "node-01: ended with exit code 4"


def test_a_node_whose_lines_tell_the_cause_comes_before_one_that_ended_earlier() -> None:
    oom = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    lines = ("[rank3]: Traceback (most recent call last):", '[rank3]:   File "t.py", line 1, in <module>', oom)
    running = node(0, *lines, state="running")
    found = first_failure([running, node(1, "Connection reset by peer", code=1, at=1.0)], ranks_per_node=4)
    assert found is not None
    failure, code = found
    assert (failure.node, failure.what, failure.code, code) == ("node-00", "a rank of it failed", None, 1)
    assert failure.diagnosis is not None
    assert failure.diagnosis.rank == 3


def test_a_host_that_is_lost_is_the_failure() -> None:
    gone = node(0, state="running", at=1.0)
    gone.lost = HostError("no answer", host="gpu0", problem="timeout")
    gone.cut, gone.failure, gone.trouble_at = True, "its host did not come back within 20 s", 1.0
    found = first_failure([gone, node(1, state="running")], ranks_per_node=8)
    assert found is not None
    assert (found[0].node, found[0].what, found[1]) == ("node-00", gone.failure, 1)


def test_what_was_never_started_was_killed_by_nobody() -> None:
    unstarted = node(0, state="never-started")
    unstarted.failure = "was never started"
    found = first_failure([unstarted, node(1, code=0)], ranks_per_node=None)
    assert found is not None
    assert (found[0].what, found[0].diagnosis, found[1]) == ("was never started", None, 1)
