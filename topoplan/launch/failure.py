"""Which node of a run that is watched failed first, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from topoplan.launch.diagnose import Diagnosis, diagnose
from topoplan.launch.outcome import OVER
from topoplan.launch.waiting import Deadline
from topoplan.launch.watch import Watch, Watched

FAILED = 1
"""Exit code where no script left one."""
LAST_WORDS_S = 0.2
"""After a failure, time for what others wrote before it to arrive: it may name the cause."""
PATIENCE_S = 2.0
"""After one that looks like the consequence of another, time for that: torchrun on its node still ends other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first node that failed; what came after is mostly its consequence."""

    node: str
    host: str
    """Its address."""
    what: str
    """Such as `ended with exit code 1`."""
    code: int | None = None
    diagnosis: Diagnosis | None = None
    tail: tuple[str, ...] = ()
    """Its last lines."""
    log: Path | None = None

    @property
    def reason(self) -> str:
        """One line for the record."""
        return f"{self.node}: {self.what}"


def first_cause(watch: Watch, *, ranks_per_node: int | None, leave: Callable[[], bool]) -> tuple[Failure, int] | None:
    """`first_failure`, once a node has failed: of those that come at nearly the same time, the one that explains the
    others. Once `leave` says so, nothing is waited for any more."""
    deadline = Deadline(PATIENCE_S)
    while True:
        watch.until(leave, deadline_s=LAST_WORDS_S)
        failed = sum(node.failed for node in watch.nodes)
        found = first_failure(watch.nodes, ranks_per_node=ranks_per_node)
        diagnosis = found[0].diagnosis if found is not None else None
        if diagnosis is None or diagnosis.certain:
            return found
        if (
            not watch.until(
                lambda failed=failed: leave() or sum(node.failed for node in watch.nodes) > failed,  # type: ignore[misc]
                deadline_s=deadline.left_s,
            )
            or leave()
        ):
            return found


def first_failure(nodes: Sequence[Watched], *, ranks_per_node: int | None) -> tuple[Failure, int] | None:
    """The first failure, and the exit code of the run; None while no node has failed.

    Ask before the others are stopped: how those end then is nobody's failure.
    """
    failed = [node for node in nodes if node.failed]
    if not failed:
        return None
    earliest = min(failed, key=lambda node: node.trouble_at or 0.0)
    diagnosis = diagnose(
        {node.node: tuple(node.tail) for node in nodes},
        {node.node: node.code for node in nodes if node.state is not None and node.state.state in OVER},
        {node.node: node.trouble_at for node in nodes if node.trouble_at is not None},
        {
            node.node: node.lost.what if node.lost is not None else "the connection was lost"
            for node in nodes
            if node.cut
        },
        ranks_per_node=ranks_per_node,
    )
    # It may be another where the trouble began: torchrun takes its time to end a node whose rank has failed.
    first = next((node for node in nodes if diagnosis is not None and node.node == diagnosis.node), earliest)
    failure = Failure(
        node=first.name,
        host=first.address,
        what=first.failure or ("its connection was lost" if first.cut else "a rank of it failed"),
        code=first.code,
        diagnosis=diagnosis,
        tail=tuple(first.tail),
        log=first.log,
    )
    return failure, first.code or earliest.code or FAILED
