"""The hosts of a run, found again from its record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from topoplan.errors import HostError, InputError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all, run_on_all
from topoplan.remote.identities import Access
from topoplan.remote.ssh import CONNECT_S
from topoplan.remote.ssh_config import SshConfig, Target
from topoplan.run.record import NodeRecord, RunRecord

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Nodes of a run, by their labels."""

    nodes: dict[str, NodeRecord]
    connections: dict[str, Connection]
    errors: dict[str, HostError]
    """Nodes whose host cannot be reached, and why."""


def targets_of(record: RunRecord, nodes: Sequence[NodeRecord]) -> dict[str, Target]:
    """How to log in to the hosts of some of the run's nodes, by their labels.

    Raises:
        InputError: the SSH configuration is wrong.
    """
    config = SshConfig(Path(record.ssh_config) if record.ssh_config else None)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda node: config.target(node.host), nodes)
        return dict(zip((node.label for node in nodes), found, strict=True))


@contextlib.contextmanager
def reach(
    record: RunRecord, access: Access, nodes: Sequence[NodeRecord] | None = None, *, deadline_s: float = CONNECT_S
) -> Iterator[Reached]:
    """Log in to the hosts of the run's nodes, or of some of them; the connections are closed at the end.

    Raises:
        InputError: the SSH configuration is wrong.
    """
    wanted = {node.label: node for node in (record.nodes if nodes is None else nodes)}
    results = connect_all(targets_of(record, tuple(wanted.values())), access, deadline_s=deadline_s)
    open_ones = {label: one for label, one in results.items() if isinstance(one, Connection)}
    try:
        yield Reached(
            nodes=wanted,
            connections=open_ones,
            errors={label: one for label, one in results.items() if isinstance(one, HostError)},
        )
    finally:
        for connection in open_ones.values():
            connection.close()


def chosen(record: RunRecord, node: int | None) -> tuple[NodeRecord, ...]:
    """One node of the run, or all for None.

    Raises:
        InputError: there is no such node.
    """
    found = tuple(one for one in record.nodes if node in (None, one.node))
    if not found:
        known = f"0 to {len(record.nodes) - 1}" if len(record.nodes) > 1 else "0"
        raise InputError(f"no node {node} in run {record.run_id}", where="--node", expected=f"expected {known}")
    return found


def ask_all(
    reached: Reached, job: Callable[[NodeRecord, Connection], T], *, deadline_s: float
) -> dict[str, T | HostError]:
    """What `job` gives for each node, all at the same time, in the order of the nodes; why not for the others."""
    given = run_on_all(
        reached.connections, lambda label, connection: job(reached.nodes[label], connection), deadline_s=deadline_s
    )
    return {label: given[label] if label in given else reached.errors[label] for label in reached.nodes}
