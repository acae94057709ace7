"""What a communication pattern puts on the links: which kinds the worst placed group crosses, and who shares them.

All groups of one shape are active at the same moment, and every rank is in one of them. The unit of a load is what one
member sends when the pattern runs at one byte per second and member: a link of rate C under a load of L lets the
pattern run at C / L.

Every flow is counted on the links of its route (`topology.Routes`). Nodes are alike and groups repeat, so the flows of
a small window of ranks are counted in place of the whole world's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Literal

from topoplan.network.placement import Group, first_ranks
from topoplan.network.topology import KINDS, Leg, Link, LinkKind, Wiring, local_ranks, routes_of
from topoplan.specs.cluster import Cluster

Pattern = Literal["ring", "all-to-all", "neighbour", "tree"]
Flow = tuple[int, int, float]
"""Sending rank, receiving rank, and the part of a member's rate that goes this way."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """The tightest link of one kind."""

    kind: LinkKind
    rate_bytes_per_s: float
    load: float
    """In parts of one member's rate."""
    flows: int
    """Flows that share it: pairs of ranks."""

    @property
    def member_bytes_per_s(self) -> float:
        """Rate at which this link lets the pattern run."""
        return self.rate_bytes_per_s / self.load


@dataclass(frozen=True, slots=True)
class Traffic:
    """The links that a pattern crosses, by kind, where they are tightest for the worst placed group."""

    inside: tuple[Crossing, ...]
    """On the way of flows that stay in an NVLink domain, or in a node without NVLink."""
    between: tuple[Crossing, ...]
    """On the way of flows that leave it."""
    latency_s: float
    """From NIC to NIC on the longest route; 0 when nothing leaves."""

    @property
    def tightest(self) -> Crossing | None:
        """The link that limits the pattern, by the rates of the links alone; None for a group of one."""
        return min((*self.inside, *self.between), key=lambda one: one.member_bytes_per_s, default=None)


@lru_cache(maxsize=1 << 16)
def traffic(shape: Group, pattern: Pattern, cluster: Cluster) -> Traffic:
    """Loads of a pattern with all groups of this shape active, from a window of the world."""
    if shape.size == 1:
        return Traffic((), (), 0.0)
    window, firsts = _window(shape, pattern, cluster)
    return _count(_flows_of(window, firsts, pattern, cluster), cluster).traffic()


@dataclass(frozen=True, slots=True)
class WorstGroup:
    """The group that a pattern runs slowest for, or the first of them."""

    first_rank: int
    traffic: Traffic
    """The tightest of the links that it crosses itself, with the loads of all groups."""


def worst_group(shape: Group, pattern: Pattern, cluster: Cluster) -> WorstGroup:
    """The worst placed group of a shape of at least two members. By the rates of the links alone."""
    window, firsts = _window(shape, pattern, cluster)
    loads = _count(_flows_of(window, firsts, pattern, cluster), cluster)
    worst: WorstGroup | None = None
    for first in firsts:
        own = loads.seen_by(_count(_flows_of(window, [first], pattern, cluster), cluster))
        # The window keeps each group's place on its leaf, block for block.
        block, offset = divmod(first, window.size * window.stride)
        here = WorstGroup(block * shape.size * shape.stride + offset, own)
        if worst is None or _pace(own) < _pace(worst.traffic) * (1 - 1e-9):
            worst = here
    if worst is None:
        raise ValueError(f"no group of shape {shape}")
    return worst


def _pace(own: Traffic) -> float:
    tightest = own.tightest
    return math.inf if tightest is None else tightest.member_bytes_per_s


def _flows_of(shape: Group, firsts: Iterable[int], pattern: Pattern, cluster: Cluster) -> Iterator[Flow]:
    return (flow for first in firsts for flow in _PATTERNS[pattern](shape.ranks(first), local_ranks(cluster)))


# Patterns -------------------------------------------------------------------------------------------------------------


def _ring(members: Sequence[int], domain_size: int) -> Iterator[Flow]:
    """Rings through all members, in rank order inside a domain.

    NCCL opens as many rings as let every member of a domain send over its own NIC once. A ring leaves a domain at the
    place where it enters the next, alternately forwards and backwards through the domains, so that it keeps to its
    rail (`graph/search.cc`, NCCL_CROSS_NIC 2); its hops inside are counted forwards here.
    """
    domains = _by_domain(members, domain_size)
    if len(domains) == 1:
        yield from _neighbours(members, domain_size)
        return
    rings = min(len(domain) for domain in domains)
    for domain, following in zip(domains, domains[1:] + domains[:1], strict=True):
        gates, next_gates = _gates(domain, rings), _gates(following, rings)
        if len(domain) > 1:
            for here, there in zip(domain, (*domain[1:], domain[0]), strict=True):
                # A ring that begins its way through the domain at a member does not arrive there from inside.
                if passing := rings - gates.count(there):
                    yield here, there, passing / rings
        for source, target in zip(gates, next_gates, strict=True):
            yield source, target, 1 / rings


def _tree(members: Sequence[int], domain_size: int) -> Iterator[Flow]:
    """Two binary trees over the domains, each for half of the data, and chains inside them.

    Up for the sum and down for the result (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", 2009; NCCL `graph/trees.cc`).
    """
    domains = _by_domain(members, domain_size)
    channels = min(len(domain) for domain in domains)
    for domain in domains:
        gates = _gates(domain, channels)
        for gate in gates:
            start = domain.index(gate)
            chain = [*domain[start:], *domain[:start]]
            for here, there in pairwise(chain):
                yield here, there, 1 / channels
                yield there, here, 1 / channels
    for child, parent in _two_trees(len(domains)):
        for here, there in zip(_gates(domains[child], channels), _gates(domains[parent], channels), strict=True):
            yield here, there, 0.5 / channels
            yield there, here, 0.5 / channels


def _two_trees(size: int) -> Iterator[tuple[int, int]]:
    """(child, parent) of both trees. The second is the first mirrored, or shifted by one where `size` is odd."""
    for place in range(1, size):
        low = place & -place
        up = (place ^ low) | (low << 1)
        parent = up if up < size else place ^ low
        yield place, parent
        if size % 2 == 0:
            yield size - 1 - place, size - 1 - parent
        else:
            yield (place + 1) % size, (parent + 1) % size


def _neighbours(members: Sequence[int], domain_size: int) -> Iterator[Flow]:
    """Every member sends to the next, the last one to the first."""
    for here, there in zip(members, (*members[1:], members[0]), strict=True):
        yield here, there, 1.0


def _all_to_all(members: Sequence[int], domain_size: int) -> Iterator[Flow]:
    """Every member sends an equal part to every other."""
    part = 1 / len(members)
    for here in members:
        for there in members:
            if here != there:
                yield here, there, part


_PATTERNS: Mapping[Pattern, Callable[[Sequence[int], int], Iterator[Flow]]] = {
    "ring": _ring,
    "all-to-all": _all_to_all,
    "neighbour": _neighbours,
    "tree": _tree,
}


def _by_domain(members: Sequence[int], domain_size: int) -> list[list[int]]:
    return [list(domain) for _, domain in groupby(members, key=lambda rank: rank // domain_size)]


def _gates(domain: Sequence[int], channels: int) -> list[int]:
    """The members at which the channels enter and leave a domain, evenly spread."""
    return [domain[channel * len(domain) // channels] for channel in range(channels)]


# Window ---------------------------------------------------------------------------------------------------------------


def _window(shape: Group, pattern: Pattern, cluster: Cluster) -> tuple[Group, Sequence[int]]:
    """A smaller shape, and the first ranks of so many groups of it that the loads on every link are those of the world.

    The wiring repeats with every leaf, or with every domain where one leaf holds all nodes. Three things repeat:
    whole leaves in a stride, since members then sit on different leaves however far apart; whole turns of a long ring
    through leaf and stride; and blocks of groups, once their place on a leaf is the same again.
    """
    unit, world = period(cluster), cluster.world_size
    size, stride = shape.size, shape.stride
    if size * stride > world:
        # Not one of the grid's shapes: the first and the last of several, such as both ends of a pipeline.
        return shape, range(max(1, world - (size - 1) * stride))
    if stride >= 2 * unit:
        stride = unit + stride % unit
    turn = math.lcm(stride, unit) // stride
    if pattern in ("ring", "neighbour") and size >= 3 * turn + 2:
        size = 2 * turn + 2 + (size - 2) % turn
    elif pattern == "tree" and unit == local_ranks(cluster) and size > 16 * turn:
        # One leaf: what a node sends is told by its place in the trees, of which these hold every kind.
        size = 8 * turn + size % (8 * turn)
    block = size * stride
    blocks = min(world // (shape.size * shape.stride), math.lcm(block, unit) // block)
    return Group(size, stride), first_ranks(Group(size, stride), block * blocks)


def period(cluster: Cluster) -> int:
    """Ranks after which the wiring repeats: the domain, or where uplinks are in use the leaf."""
    wiring, local = Wiring(cluster), local_ranks(cluster)
    if wiring.leaf_units == 1 and (wiring.planes == 1 or wiring.has_nvlink):
        return local
    return math.lcm(local, wiring.nodes_per_leaf * cluster.gpus_per_node)


# Counting -------------------------------------------------------------------------------------------------------------


_Parts = dict[tuple[int, ...], list[float]]
"""Load and number of flows on each part of the routes."""


def _count(flows: Iterator[Flow], cluster: Cluster) -> _Loads:
    """Route the flows: first onto the parts that routes are made of, then onto the links of those."""
    wiring, routes = Wiring(cluster), routes_of(cluster)
    gpus, local = cluster.gpus_per_node, local_ranks(cluster)
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    stay: _Parts = {}
    leave: _Parts = {}
    cross: _Parts = {}
    enter: _Parts = {}
    for source, target, load in flows:
        if source // local == target // local:
            _add(stay, (source, target), load)
            continue
        (from_node, from_gpu), (to_node, to_gpu) = divmod(source, gpus), divmod(target, gpus)
        nics = pairs.get((from_gpu, to_gpu))
        if nics is None:
            nics = pairs[from_gpu, to_gpu] = wiring.nic_pairs(from_gpu, to_gpu)
        for from_nic, to_nic in nics:
            part = load / len(nics)
            _add(leave, (source, from_nic), part)
            _add(cross, (from_node, from_nic, to_node, to_nic), part)
            _add(enter, (to_nic, target), part)

    loads = _Loads(wiring)
    for (source, target), (load, count) in stay.items():
        leg = routes.inside(source % gpus, target % gpus)
        half = len(leg) // 2
        loads.add(leg[:half], source // gpus, load, count, is_inside=True)
        loads.add(leg[half:], target // gpus, load, count, is_inside=True)
    for (source, nic), (load, count) in leave.items():
        loads.add(routes.leave(source % gpus, nic), source // gpus, load, count)
    for (nic, target), (load, count) in enter.items():
        loads.add(routes.enter(nic, target % gpus), target // gpus, load, count)
    for (from_node, from_nic, to_node, to_nic), (load, count) in cross.items():
        leg = routes.across(from_nic, to_nic, same_leaf=wiring.leaf_of(from_node) == wiring.leaf_of(to_node))
        half = len(leg) // 2
        loads.add(leg[:half], from_node, load, count)
        loads.add(leg[half:], to_node, load, count)
        loads.latency_s = max(loads.latency_s, sum(link.latency_s for link in leg))
    return loads


def _add(parts: _Parts, key: tuple[int, ...], load: float) -> None:
    entry = parts.get(key)
    if entry is None:
        parts[key] = [load, 1]
    else:
        entry[0] += load
        entry[1] += 1


class _Loads:
    """Load and number of flows by link, and which links the flows of either kind cross."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._entries: dict[tuple[int, str], list[float]] = {}
        self.inside: dict[tuple[int, str], Link] = {}
        self.between: dict[tuple[int, str], Link] = {}
        self.latency_s = 0.0
        """From NIC to NIC on the longest route."""

    def add(self, leg: Leg, node: int, load: float, count: float, *, is_inside: bool = False) -> None:
        """Flows over links of this node and its leaves."""
        crossed = self.inside if is_inside else self.between
        for link in leg:
            key = (self._wiring.leaf_of(node) if link.owner == "leaf" else node, link.name)
            crossed[key] = link
            entry = self._entries.setdefault(key, [0.0, 0.0])
            entry[0] += load
            entry[1] += count

    def traffic(self) -> Traffic:
        """The tightest links of all that are crossed."""
        return self.seen_by(self)

    def seen_by(self, some: _Loads) -> Traffic:
        """The tightest of the links that some of the flows cross, under the loads of all."""
        return Traffic(self._tightest(some.inside), self._tightest(some.between), some.latency_s)

    def _tightest(self, crossed: Mapping[tuple[int, str], Link]) -> tuple[Crossing, ...]:
        worst: dict[LinkKind, Crossing] = {}
        for key, link in crossed.items():
            load, count = self._entries[key]
            found = worst.get(link.kind)
            # Sums of the same parts in another order differ in their last bits.
            if found is None or load / link.rate_bytes_per_s > (1 + 1e-9) * found.load / found.rate_bytes_per_s:
                worst[link.kind] = Crossing(link.kind, link.rate_bytes_per_s, load, int(count))
        return tuple(worst[kind] for kind in KINDS if kind in worst)
