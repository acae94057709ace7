"""Which node of a watched run failed first, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from topoplan.errors import HostError
from topoplan.remote.waiting import INTERRUPT_LOOK_S, Call, Deadline
from topoplan.run.causes import FULL_DISK, HANG, READ_ONLY_DISK, REBOOTED, REBOOTED_BY, TIDIED
from topoplan.run.diagnose import Diagnosis, diagnose
from topoplan.run.events import Event, Tell
from topoplan.run.node import READ_ONLY, directory_problem, full_disks
from topoplan.run.outcome import ENDED_STATES
from topoplan.run.reachability import duration_text
from topoplan.run.stacks import outlying_ranks, place_text, stack_lines
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode, failure_phrase, first_failure_s

FAILED = 1
"""Exit code if no script left one."""
LATE_OUTPUT_S = 0.2
"""Wait after a failure for output that other nodes wrote before it to arrive: it may name the cause."""
ORIGINAL_FAILURE_S = 5.0
"""Wait for the original failure after one that looks like a consequence: torchrun there may still be ending other
ranks, and the loss of a host is noticed only after some seconds."""
REACHABLE_S = 25.0
"""Wait for hosts that were out of sight before the failure: their output may be older. Enough for one login attempt."""
DISKS_S = 8.0
_NOTICED_S = 5.0
"""Longest delay until the loss of a host is noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first node that failed; later failures are mostly consequences of it."""

    node: str
    host: str
    what: str
    """How the node failed, such as `ended with exit code 1`."""
    code: int | None = None
    diagnosis: Diagnosis | None = None
    tail: tuple[str, ...] = ()
    log: Path | None = None
    stacks: tuple[str, ...] = ()
    """If the run had gone quiet before, the lines that show where its ranks were in their programs."""

    @property
    def reason(self) -> str:
        """One line for the run's record."""
        return f"{self.node}: {self.what}"


def first_cause(
    watch: Watch, *, ranks_per_node: int | None, tell: Tell, leave: Callable[[], bool]
) -> tuple[Failure, int] | None:
    """Return the first failure and the exit code of the run, after giving the cause time to appear.

    Call this once a node has failed. Among failures at nearly the same time, the one that explains the others counts,
    even on a host that cannot be seen yet. Waiting ends as soon as `leave` returns true. The host is asked for full
    disks if nothing explains the failure, as a job on one cannot log its error, or if a line reports one, as it seldom
    says which.
    """
    found = _first_cause(watch, ranks_per_node, tell, leave)
    node = next((one for one in watch.nodes if found is not None and one.name == found[0].node), None)
    if found is None or node is None or node.connection is None or not _may_be_a_disk(found[0]):
        return found
    connection, run_dir = node.connection, node.run_dir
    call = Call(lambda: full_disks(connection, run_dir, deadline_s=DISKS_S))
    deadline = Deadline(DISKS_S)
    watch.until(lambda: leave() or call.done.is_set(), deadline_s=DISKS_S)
    while not leave() and deadline.left_s > 0 and not call.done.wait(INTERRUPT_LOOK_S):
        pass  # all nodes are over
    with contextlib.suppress(HostError):
        if call.done.is_set() and (full := call.result()):
            return _of_full_disks(found[0], node, full), found[1]
    return found


def _may_be_a_disk(failure: Failure) -> bool:
    kind = failure.diagnosis.kind if failure.diagnosis is not None else "exit"
    return failure.code != 0 and kind in ("exit", "disk-full", "killed")


def _of_full_disks(failure: Failure, node: WatchedNode, full: Sequence[str]) -> Failure:
    said = failure.diagnosis
    is_full = not full[0].startswith(READ_ONLY)
    diagnosis = Diagnosis(
        node=node.node,
        rank=said.rank if said is not None else None,
        kind="disk-full" if is_full else "read-only",
        cause="; ".join(full),
        remedy=FULL_DISK if is_full else READ_ONLY_DISK,
        evidence=said.evidence if said is not None else (),
        certain=True,
    )
    what = failure.what if is_full or failure.code is not None else "has ended, and its exit code could not be written"
    return replace(failure, diagnosis=diagnosis, what=what)


def _first_cause(
    watch: Watch, ranks_per_node: int | None, tell: Tell, leave: Callable[[], bool]
) -> tuple[Failure, int] | None:
    _wait_for_hosts(watch, tell, leave)
    deadline = Deadline(ORIGINAL_FAILURE_S)

    def known() -> tuple[int, int]:
        return sum(node.failed for node in watch.nodes), sum(node.unreachable is not None for node in watch.nodes)

    while True:
        watch.until(leave, deadline_s=LATE_OUTPUT_S)
        before = known()
        found = first_failure(watch.nodes, ranks_per_node=ranks_per_node)
        diagnosis = found[0].diagnosis if found is not None else None
        by_itself = any(node.failed and not _why_stopped(node) for node in watch.nodes)
        if by_itself if diagnosis is None else diagnosis.certain:
            return found
        if (
            not watch.until(lambda before=before: leave() or known() != before, deadline_s=deadline.left_s)  # type: ignore[misc]
            or leave()
        ):
            return found


def hang_failure(watch: Watch, *, ranks_per_node: int | None) -> Failure:
    """Return the failure of a run that makes no more steps; the rank at fault is named as far as it is known."""
    apart, late = outlying_ranks(watch.stacks), watch.silence.suspect()
    oldest = next(iter(watch.silence.last_lines()), None)
    rank = apart[0] if apart and ranks_per_node else None if late is None else late.rank
    number = apart[0] // ranks_per_node if apart and ranks_per_node else (late or oldest or watch.nodes[0]).node
    early = None if apart else next((one for one in watch.nodes if one.ended), None)
    node = early or next((one for one in watch.nodes if one.node == number), watch.nodes[0])
    if early is not None:
        rank, cause = None, f"{early.name} has ended with exit code 0, and the others wait for it"
    elif apart:
        cause = f"rank {apart[0]} {place_text(watch.stacks[apart[0]])}, and the others wait for it"
    elif late is not None:
        cause = f"{late.name if rank is None else f'rank {rank}'} wrote its last line long before all others"
    else:
        cause = "a rank hangs, but nothing shows which"
        if not any(watch.stacks.values()):
            cause += "; install py-spy in the job's environment to see where each one is"
    return Failure(
        node=node.name,
        host=node.address,
        what=f"no step for {duration_text(watch.silence.quiet_s)}",
        diagnosis=Diagnosis(
            node=node.node, rank=rank, kind="hang", cause=cause, remedy=HANG, evidence=(), certain=bool(apart)
        ),
        tail=tuple(node.tail.lines()),
        log=node.log,
        stacks=tuple(stack_lines(watch.stacks)),
    )


def _what_happened(node: WatchedNode, diagnosis: Diagnosis | None) -> str:
    if diagnosis is not None and diagnosis.kind == "hang":
        return "one of its ranks hangs or is far behind"
    if node.unreachable is not None:
        return "its host is unreachable, for its peers too"
    if node.state is not None and node.state.state in ENDED_STATES:
        return failure_phrase(node.state)
    return "one of its ranks failed"


def _why_stopped(node: WatchedNode) -> str:
    """Return the reason if the node's own host ended its job because of another node; otherwise empty."""
    return node.state.stopped if node.state is not None else ""


def _peers_report(node: WatchedNode, nodes: Sequence[WatchedNode]) -> str:
    """Return how the node failed according to peers whose hosts ended their jobs for that; empty if there are none."""
    return next((said for other in nodes if (said := _why_stopped(other)).startswith(f"{node.name} ")), "")


def _wait_for_hosts(watch: Watch, tell: Tell, leave: Callable[[], bool]) -> None:
    """Wait until the state and output of the hosts that were out of sight before the failure are known."""

    def hidden() -> list[str]:
        until_s = first_failure_s(watch.nodes) + _NOTICED_S
        return [
            node.name
            for node in watch.nodes
            if not node.is_over
            and (
                node.unreachable_since_s <= until_s
                if node.unreachable_since_s is not None
                else node.state is not None and node.state.state in ENDED_STATES
            )
        ]

    watch.retry_now()
    if watch.until(lambda: leave() or not hidden(), deadline_s=LATE_OUTPUT_S):
        return
    failed = ", ".join(node.name for node in watch.nodes if node.failed)
    text = f"{failed} failed; the cause may be on {', '.join(hidden())}, waiting up to {REACHABLE_S:.0f} s to find out"
    tell(Event(kind="note", text=text))
    watch.until(lambda: leave() or not hidden(), deadline_s=REACHABLE_S)


def first_failure(nodes: Sequence[WatchedNode], *, ranks_per_node: int | None) -> tuple[Failure, int] | None:
    """Return the first failure and the exit code of the run; None while no node has failed.

    A host that cannot be seen is to blame if nothing visible explains the others' failure better. Call this before the
    other nodes are stopped: how those end then is not a failure.
    """
    failed = [node for node in nodes if node.failed]
    if not failed:
        return None
    by_itself = [node for node in failed if not _why_stopped(node)]
    candidates = by_itself or [node for node in nodes if _peers_report(node, nodes)] or failed
    earliest = min(candidates, key=lambda node: node.ended_at_s or 0.0)
    diagnosis = diagnose(
        {node.node: node.tail.lines() for node in nodes},
        {
            node.node: node.code
            for node in nodes
            if node.state is not None and node.state.state in ENDED_STATES and not _why_stopped(node)
        },
        {node.node: node.ended_at_s for node in nodes if node.ended_at_s is not None},
        {node.node: node.unreachable.what for node in nodes if node.unreachable is not None},
        ranks_per_node=ranks_per_node,
        addresses={node.node: node.address for node in nodes},
    )
    # The trouble may have begun on another node: torchrun takes a while to end a node whose rank has failed.
    first = next((node for node in nodes if diagnosis is not None and node.node == diagnosis.node), earliest)
    if diagnosis is not None and diagnosis.kind == "killed" and first.state and first.state.state == "rebooted":
        diagnosis = replace(diagnosis, cause=REBOOTED_BY, remedy=REBOOTED)
    if diagnosis is not None and diagnosis.kind == "killed" and first.state and first.state.is_unreadable:
        cause = f"how its job ended is not known: {directory_problem(first.state.directory)}"
        diagnosis = replace(diagnosis, cause=cause, remedy=TIDIED, certain=False)
    failure = Failure(
        node=first.name,
        host=first.address,
        what=first.failure
        or _peers_report(first, nodes).removeprefix(f"{first.name} ")
        or _what_happened(first, diagnosis),
        code=first.code,
        diagnosis=diagnosis,
        tail=tuple(first.tail.lines()),
        log=first.log,
    )
    return failure, first.code or earliest.code or FAILED
