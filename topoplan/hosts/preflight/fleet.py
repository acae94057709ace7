"""The hosts that a preflight checks, and helpers for its checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from topoplan.hosts.facts import HostFacts
from topoplan.hosts.needs import RunNeeds
from topoplan.hosts.result import Result, skipped
from topoplan.specs.cluster import Cluster, Host
from topoplan.units import named

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host that answered."""

    number: int
    name: str
    host: Host
    facts: HostFacts
    query_times_s: tuple[float, float] | None = None
    """When the host was asked and when it had answered, by this machine's clock, in seconds since 1970."""

    def not_reported(self, field: str, otherwise: str = "") -> Result:
        """Return the result for a missing fact: the reason, as far as it is known."""
        return skipped(self.facts.missing.get(field) or otherwise or f"the host does not report {field}")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All hosts that answered, and what is needed of them."""

    cluster: Cluster
    needs: RunNeeds | None
    """None if there is no plan yet."""
    nodes: tuple[Node, ...]

    @property
    def uses_rdma(self) -> bool:
        """Whether InfiniBand, RoCE or EFA is used between nodes."""
        return self.cluster.nodes > 1 and self.cluster.fabric.uses_rdma

    @cached_property
    def master_address(self) -> str:
        """The address of node 0 as in the spec, without brackets."""
        return self.cluster.hosts[0].address.strip("[]")

    def earlier_run(self, node: Node) -> str:
        """Return which run may still be running on a host, and how to end it."""
        run = self.needs.earlier_runs.get(node.host.address) if self.needs is not None else None
        if run is None:
            return "an earlier run: see `topoplan runs` on the machine that started it, and `topoplan runs stop ID`"
        return f"run {run}, which is not known to have ended: `topoplan runs stop {run}` ends it"

    def others(self, node: Node) -> tuple[Node, ...]:
        """Return the other hosts."""
        return tuple(other for other in self.nodes if other is not node)

    def majority_against(self, node: Node, value: Callable[[Node], T | None]) -> tuple[Node, ...]:
        """Return the hosts with the most common value if this host's value differs, otherwise none.

        On a tie, the value that comes first is taken as the most common one. Hosts whose value is unknown are left out.
        """
        usual = most_common(map(value, self.nodes))
        own = value(node)
        if usual is None or own is None or own == usual:
            return ()
        return tuple(other for other in self.nodes if value(other) == usual)

    def difference(self, node: Node, value: Callable[[Node], T | None]) -> str:
        """Return `2.7.0, and 2.6.0 on alpha, beta` if this host's value is not the most common one; otherwise empty."""
        others = self.majority_against(node, value)
        return f"{value(node)}, and {value(others[0])} on {names(others)}" if others else ""


Check = Callable[[Fleet, Node], Result | None]
"""One check of one host; returns None if it does not apply."""


def most_common(values: Iterable[T | None]) -> T | None:
    """Return the most common value, the first one on a tie; None if no value is known."""
    counts = Counter(value for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None


def names(nodes: Iterable[Node]) -> str:
    """Return the names of nodes, such as `alpha, beta and 5 more`."""
    return named(node.name for node in nodes)


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparison: (5, 15, 0) for `5.15.0-105-generic`."""
    found = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", text.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()
