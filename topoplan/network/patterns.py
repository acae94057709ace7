"""Which messages the members of a group send each other, by communication pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, permutations
from typing import Literal

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
