from pathlib import Path

import pytest

from topoplan.errors import HostError
from topoplan.run.failure import first_failure
from topoplan.run.node import NodeState, State
from topoplan.run.shown import Tail
from topoplan.run.watched import WatchedNode


def node(number: int, *lines: str, code: int | None = None, state: State = "ended", at: float = 0.0) -> WatchedNode:
    """Return a node as a watch leaves it."""
    name = f"node-{number:02d}"
    made = WatchedNode(
        node=number, name=name, address=f"gpu{number}", run_dir="", connection=None, log=Path(f"/l/{name}")
    )
    made.tail = Tail("".join(f"{line}\n" for line in lines))
    made.state = NodeState(state=state, code=code)
    if state != "running":
        made.ended, made.code, made.ended_at_s = True, code, at
        made.failure = f"ended with exit code {code}" if code != 0 else ""
    return made


def test_there_is_none_while_no_node_has_failed() -> None:
    assert first_failure([node(0, code=0), node(1, state="running")], ranks_per_node=8) is None


def test_of_ends_that_explain_as_little_the_earliest_counts() -> None:
    found = first_failure([node(0, "x", code=3, at=2.0), node(1, "y", code=4, at=1.0)], ranks_per_node=8)
    failure, code = found
    assert (failure.node, failure.host, failure.code, failure.tail, code) == ("node-01", "gpu1", 4, ("y",), 4)
    assert failure.reason == "node-01: ended with exit code 4"


def test_a_node_whose_lines_tell_the_cause_comes_before_one_that_ended_earlier() -> None:
    oom = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    lines = ("[rank3]: Traceback (most recent call last):", '[rank3]:   File "t.py", line 1, in <module>', oom)
    running = node(0, *lines, state="running")
    found = first_failure([running, node(1, "Connection reset by peer", code=1, at=1.0)], ranks_per_node=4)
    failure, code = found
    assert (failure.node, failure.what, failure.code, code) == ("node-00", "one of its ranks failed", None, 1)
    assert failure.diagnosis.rank == 3


PEER_GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [{}]:41273"


def hidden(number: int, *lines: str) -> WatchedNode:
    """Return a node whose host cannot be seen."""
    made = node(number, *lines, state="running")
    made.unreachable = HostError("no answer", host=made.address, problem="timeout")
    made.unreachable_since_s = made.ended_at_s = 1.0
    return made


def test_a_host_that_cannot_be_seen_is_to_blame_only_once_its_peers_have_lost_it_too() -> None:
    gone = hidden(2, "step 4")
    assert first_failure([node(0, state="running"), gone], ranks_per_node=8) is None
    found = first_failure([node(0, PEER_GONE.format("gpu2"), code=1, at=9.0), gone], ranks_per_node=8)
    assert (found[0].node, found[0].what, found[1]) == (
        "node-02",
        "its host is unreachable, for its peers too",
        1,
    )
    found = first_failure([node(0, "boom", code=7, at=9.0), gone], ranks_per_node=8)
    assert (found[0].node, found[1]) == ("node-00", 7)


@pytest.mark.parametrize(("named", "blamed"), [("gpu2", "node-02"), ("gpu1", "node-00"), ("gpu12", "node-02")])
def test_it_is_not_to_blame_where_its_peers_name_another_that_runs(named: str, blamed: str) -> None:
    nodes = [node(0, PEER_GONE.format(named), code=1, at=9.0), node(1, state="running"), hidden(2)]
    found = first_failure(nodes, ranks_per_node=8)
    assert found[0].node == blamed


def test_an_end_counts_also_where_not_all_that_was_written_before_it_has_come() -> None:
    behind = node(1, "step 4", code=7, at=1.0)
    behind.ended, behind.failure = False, ""
    found = first_failure([node(0, PEER_GONE.format("gpu1"), code=1, at=3.0), behind], ranks_per_node=8)
    assert (found[0].node, found[0].what, found[1]) == ("node-01", "ended with exit code 7", 7)


def test_a_host_that_is_given_up_is_the_failure() -> None:
    gone = hidden(0)
    gone.given_up, gone.failure = gone.unreachable, "its host was unreachable for 20 s"
    found = first_failure([gone, node(1, state="running")], ranks_per_node=8)
    assert (found[0].node, found[0].what, found[1]) == ("node-00", gone.failure, 1)


def test_what_was_never_started_was_killed_by_nobody() -> None:
    unstarted = node(0, state="never-started")
    unstarted.failure = "was never started"
    found = first_failure([unstarted, node(1, code=0)], ranks_per_node=None)
    assert (found[0].what, found[0].diagnosis, found[1]) == ("was never started", None, 1)
