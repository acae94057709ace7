"""What a preflight looks at, and the words that its looks share."""

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
    """Its node rank."""
    name: str
    host: Host
    """As the spec has it."""
    facts: HostFacts
    asked: tuple[float, float] | None = None
    """When it was asked and when it had answered, by this machine's clock, in seconds since 1970."""

    def silent(self, field: str, otherwise: str = "") -> Result:
        """The outcome where a fact is missing: why, as far as is known."""
        return skipped(self.facts.missing.get(field) or otherwise or f"the host does not say: {field}")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All hosts that answered, and what is wanted of them."""

    cluster: Cluster
    needs: RunNeeds | None
    """None where there is no plan yet."""
    nodes: tuple[Node, ...]

    @property
    def uses_rdma(self) -> bool:
        """InfiniBand, RoCE or EFA between nodes."""
        return self.cluster.nodes > 1 and self.cluster.fabric.uses_rdma

    @cached_property
    def master_address(self) -> str:
        """The address of node 0 as the spec has it, without brackets."""
        return self.cluster.hosts[0].address.strip("[]")

    def others(self, node: Node) -> tuple[Node, ...]:
        """The other hosts."""
        return tuple(other for other in self.nodes if other is not node)

    def unlike(self, node: Node, value: Callable[[Node], T | None]) -> tuple[Node, ...]:
        """The hosts that have what most have, where this one has something else; else none.

        On a tie those are taken for most that come first. A host that does not know is left out.
        """
        usual = most_common(map(value, self.nodes))
        own = value(node)
        if usual is None or own is None or own == usual:
            return ()
        return tuple(other for other in self.nodes if value(other) == usual)


Look = Callable[[Scene, Node], Result | None]
"""One look at one host; None where it does not apply."""


def most_common(values: Iterable[T | None]) -> T | None:
    """The value that most have; the first one of several. None where nobody knows."""
    counts = Counter(value for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None


def names(nodes: Iterable[Node]) -> str:
    """`alpha, beta and 5 more`."""
    return named(node.name for node in nodes)


def version(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version, for comparing: (5, 15, 0) of `5.15.0-105-generic`, (2, 21, 5) of
    `2.21.5+cuda12.4`."""
    found = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", text.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()
