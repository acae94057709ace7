"""Find the hosts of a run again from its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from topoplan.errors import HostError, InputError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import logged_in
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import SshConfig, Target
from topoplan.run.record import NodeRecord, RunRecord

T = TypeVar("T")


def targets_of(record: RunRecord, nodes: Sequence[NodeRecord]) -> dict[str, Target]:
    """Return the login targets of nodes by label. Raises InputError: the SSH configuration is wrong."""
    config = SshConfig(Path(record.ssh_config) if record.ssh_config else None)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda node: config.target(node.host), nodes)
        return dict(zip((node.label for node in nodes), found, strict=True))


def chosen(record: RunRecord, node: int | None) -> tuple[NodeRecord, ...]:
    """Return one node of the run, or all if `node` is None. Raises InputError: there is no such node."""
    found = tuple(one for one in record.nodes if node in (None, one.node))
    if not found:
        known = f"0 to {len(record.nodes) - 1}" if len(record.nodes) > 1 else "0"
        raise InputError(f"no node {node} in run {record.run_id}", where="--node", expected=f"expected {known}")
    return found


def ask_all(
    record: RunRecord, access: Access, job: Callable[[NodeRecord, Connection], T], *, deadline_s: float
) -> dict[str, T | HostError]:
    """Return the result of `job` for each node of the run, run concurrently, in node order; the error where it failed.

    Raises InputError: the SSH configuration is wrong.
    """
    nodes = {node.label: node for node in record.nodes}
    with logged_in(targets_of(record, record.nodes), access) as hosts:
        return hosts.ask(lambda label, connection: job(nodes[label], connection), deadline_s=deadline_s)
