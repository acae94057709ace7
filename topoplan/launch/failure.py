"""Which node of a run that is watched failed first, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topoplan.launch.diagnose import Diagnosis, diagnose
from topoplan.launch.outcome import OVER
from topoplan.launch.watch import Watched

FAILED = 1
"""Exit code where no script left one."""


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
