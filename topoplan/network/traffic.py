"""The load that a communication pattern puts on links: which kinds the worst placed group crosses, and who shares them.

All groups of one shape are active at the same time, and every rank is in one of them. The unit of load is what one
member sends if the pattern runs at one byte per second and member: a link of rate C under a load of L lets the pattern
run at C / L.

Every message is counted on the links of its route (`routes.py`). Nodes are alike and groups repeat, so the messages of
a small window of ranks are counted instead of all messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise, permutations
from typing import Literal, NamedTuple

from topoplan.network.placement import Group, first_ranks
from topoplan.network.routes import routes_of
from topoplan.network.topology import KINDS, Link, LinkKind, Wiring, local_ranks
from topoplan.specs.cluster import Cluster

Pattern = Literal["ring", "all-to-all", "neighbour", "tree"]
Message = tuple[int, int, float]
"""(sending rank, receiving rank, fraction of a member's rate that the message takes)."""


def _ring(members: Sequence[int], domain_size: int) -> Iterator[Message]:
    """Rings through all members, in rank order inside a domain.

    NCCL opens as many rings as it takes for every member of a domain to send over its own NIC once. A ring leaves a
    domain at the same position at which it enters the next one, alternately forward and backward through the domains,
    so that it stays on its rail (`graph/search.cc`, NCCL_CROSS_NIC 2); its hops inside a domain are counted forward
    here.
    """
    domains = _by_domain(members, domain_size)
    if len(domains) == 1:
        yield from _neighbours(members, domain_size)
        return
    rings = min(len(domain) for domain in domains)
    for domain, following in zip(domains, domains[1:] + domains[:1], strict=True):
        gates, next_gates = _gates(domain, rings), _gates(following, rings)
        for here, there in _circle(domain):
            # A ring that enters the domain at a member does not reach the member from inside.
            if passing := rings - gates.count(there):
                yield here, there, passing / rings
        for source, target in zip(gates, next_gates, strict=True):
            yield source, target, 1 / rings


def _tree(members: Sequence[int], domain_size: int) -> Iterator[Message]:
    """Two binary trees over the domains, each for half of the data, and chains inside the domains.

    Data goes up for the sum and down for the result (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
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
    """Yield (child, parent) of both trees; the second is the first mirrored, or shifted by one if `size` is odd."""
    for place in range(1, size):
        low = place & -place
        up = (place ^ low) | (low << 1)
        parent = up if up < size else place ^ low
        yield place, parent
        if size % 2 == 0:
            yield size - 1 - place, size - 1 - parent
        else:
            yield (place + 1) % size, (parent + 1) % size


def _neighbours(members: Sequence[int], domain_size: int) -> Iterator[Message]:
    """Every member sends to the next one, the last one to the first."""
    for here, there in _circle(members):
        yield here, there, 1.0


def _all_to_all(members: Sequence[int], domain_size: int) -> Iterator[Message]:
    """Every member sends an equal part to every other member."""
    for here, there in permutations(members, 2):
        yield here, there, 1 / len(members)


def _by_domain(members: Sequence[int], domain_size: int) -> list[list[int]]:
    return [list(domain) for _, domain in groupby(members, key=lambda rank: rank // domain_size)]


def _gates(domain: Sequence[int], channels: int) -> list[int]:
    """Return the members at which the channels enter and leave a domain, evenly spread."""
    return [domain[channel * len(domain) // channels] for channel in range(channels)]


def _circle(members: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(members, (*members[1:], members[0]), strict=True)


MESSAGES: Mapping[Pattern, Callable[[Sequence[int], int], Iterator[Message]]] = {
    "ring": _ring,
    "all-to-all": _all_to_all,
    "neighbour": _neighbours,
    "tree": _tree,
}
"""The messages of a pattern, from the members of a group and the number of consecutive ranks in a domain."""


class LoadedLink(NamedTuple):
    """A link and the load that a pattern puts on it."""

    kind: LinkKind
    rate_bytes_per_s: float
    load: float
    """Load, as a multiple of one member's rate."""
    messages: int
    """Pairs of ranks that share the link."""

    @property
    def member_bytes_per_s(self) -> float:
        """Rate at which this link lets the pattern run."""
        return self.rate_bytes_per_s / self.load


class LinkLoads(NamedTuple):
    """The tightest link of each kind that a pattern crosses."""

    inside: tuple[LoadedLink, ...]
    """Links used by messages that stay in an NVLink domain, or without NVLink in a node."""
    between: tuple[LoadedLink, ...]
    """Links used by messages that leave the domain."""
    latency_s: float
    """Latency from NIC to NIC on the longest route; 0 if nothing leaves a domain."""

    @property
    def tightest(self) -> LoadedLink:
        """The link that limits the pattern, by the rates of the links alone. A group of one has none."""
        return _tightest((*self.inside, *self.between))


def _tightest(links: Sequence[LoadedLink]) -> LoadedLink:
    """Return the first of the tightest links, with a tolerance: sums in another order differ in their last bits."""
    least = min(one.member_bytes_per_s for one in links)
    return next(one for one in links if one.member_bytes_per_s <= least * (1 + 1e-9))


@lru_cache(maxsize=1 << 16)
def traffic(shape: Group, pattern: Pattern, cluster: Cluster) -> LinkLoads:
    """Return the loads of a pattern with all groups of this shape active, from a window of the world."""
    if shape.size == 1:
        return LinkLoads((), (), 0.0)
    window, firsts = _window(shape, pattern, cluster)
    count = _count(window, firsts, pattern, cluster)
    return count.seen_by(count)


def worst_group(shape: Group, pattern: Pattern, cluster: Cluster) -> tuple[int, LinkLoads]:
    """Return the lowest rank of the worst placed group, and the tightest of the links that the group crosses.

    Links have the loads of all groups, and are compared by their rates alone. Of several equally bad groups it is the
    first.
    """
    window, firsts = _window(shape, pattern, cluster)
    count = _count(window, firsts, pattern, cluster)
    loads = {first: count.seen_by(_count(window, [first], pattern, cluster)) for first in firsts}
    least = min(own.tightest.member_bytes_per_s for own in loads.values())
    first = next(one for one in firsts if loads[one].tightest.member_bytes_per_s <= least * (1 + 1e-9))
    # The window keeps each group's position on its leaf, block for block.
    block, offset = divmod(first, window.size * window.stride)
    return block * shape.size * shape.stride + offset, loads[first]


def _window(shape: Group, pattern: Pattern, cluster: Cluster) -> tuple[Group, Sequence[int]]:
    """Return a smaller shape, and the first ranks of enough groups of it to load every link as the world does.

    The wiring repeats with every leaf, or with every domain if one leaf holds all nodes. Three things repeat: whole
    leaves in a stride, since members then are on different leaves however far apart; whole turns of a long ring through
    leaf and stride; and blocks of groups, once their position on a leaf is the same again.
    """
    unit, world = period(cluster), cluster.world_size
    size, stride = shape.size, shape.stride
    if size * stride > world:
        # Not a shape of the rank grid: the first and the last of several ranks, such as both ends of a pipeline.
        return shape, range(max(1, world - (size - 1) * stride))
    if stride >= 2 * unit:
        stride = unit + stride % unit
    turn = math.lcm(stride, unit) // stride
    if pattern in ("ring", "neighbour") and size >= 3 * turn + 2:
        size = 2 * turn + 2 + (size - 2) % turn
    elif pattern == "tree" and unit == local_ranks(cluster) and size > 16 * turn:
        # One leaf: what a node sends depends on its position in the trees, of which this size has every kind.
        size = 8 * turn + size % (8 * turn)
    block = size * stride
    blocks = min(world // (shape.size * shape.stride), math.lcm(block, unit) // block)
    return Group(size, stride), first_ranks(Group(size, stride), block * blocks)


def period(cluster: Cluster) -> int:
    """Return the number of ranks after which the wiring repeats: the domain, or the leaf if uplinks are in use."""
    wiring, local = Wiring(cluster), local_ranks(cluster)
    if wiring.leaf_units == 1 and (wiring.planes == 1 or wiring.has_nvlink):
        return local
    return math.lcm(local, wiring.nodes_per_leaf * cluster.gpus_per_node)


_Place = tuple[int, str]
"""(index of a node or a leaf, name of one of its links)."""


class _Count:
    """Loads and numbers of messages by link, and which links are crossed by messages inside and between domains."""

    def __init__(self) -> None:
        self.loads: dict[_Place, float] = {}
        self.messages: dict[_Place, int] = {}
        self.inside: dict[_Place, Link] = {}
        self.between: dict[_Place, Link] = {}
        self.latency_s = 0.0

    def seen_by(self, some: _Count) -> LinkLoads:
        """Return the tightest of the links that some of the messages cross, under the loads of all."""
        return LinkLoads(self._by_kind(some.inside), self._by_kind(some.between), some.latency_s)

    def _by_kind(self, crossed: Mapping[_Place, Link]) -> tuple[LoadedLink, ...]:
        found: dict[LinkKind, list[LoadedLink]] = {}
        for place, link in crossed.items():
            loaded = LoadedLink(link.kind, link.rate_bytes_per_s, self.loads[place], self.messages[place])
            found.setdefault(link.kind, []).append(loaded)
        return tuple(_tightest(found[kind]) for kind in KINDS if kind in found)


def _count(shape: Group, firsts: Iterable[int], pattern: Pattern, cluster: Cluster) -> _Count:
    """Count the messages of these groups on every link of their routes."""
    wiring, routes, local, gpus = Wiring(cluster), routes_of(cluster), local_ranks(cluster), cluster.gpus_per_node
    count = _Count()
    messages = (message for first in firsts for message in MESSAGES[pattern](shape.ranks(first), local))
    for source, target, load in messages:
        crossed = count.inside if source // local == target // local else count.between
        ways = routes.between(source, target)
        for route in ways:
            count.latency_s = max(count.latency_s, route.network_latency_s)
            for node, links in ((source // gpus, route.sending), (target // gpus, route.receiving)):
                for link in links:
                    place = (wiring.leaf_of(node) if link.kind == "uplink" else node, link.name)
                    crossed[place] = link
                    count.loads[place] = count.loads.get(place, 0.0) + load / len(ways)
                    count.messages[place] = count.messages.get(place, 0) + 1
    return count
