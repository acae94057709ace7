"""Which ranks form a group, and where they are placed.

Megatron numbers its ranks in the order tp-cp-ep-dp-pp, the first varying fastest: every group is one arithmetic
progression of ranks. Experts have a grid of their own, etp-ep-edp-pp. Source: megatron-core 0.16
`core/parallel_state.py` (RankGenerator, initialize_model_parallel).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

from topoplan.layout.layout import Layout

GroupName = Literal["tp", "cp", "dp", "dp_cp", "pp", "etp", "ep", "tp_ep", "edp"]


class Group(NamedTuple):
    """The shape of a group: `size` ranks, `stride` apart. All groups of one name have the same shape."""

    size: int
    stride: int

    def ranks(self, first: int) -> range:
        """Return the members of the group whose lowest rank is `first`."""
        return range(first, first + self.size * self.stride, self.stride)

    def number(self, rank: int) -> int:
        """Return the index of the group that a rank is in; groups are counted by their lowest ranks."""
        return rank // (self.size * self.stride) * self.stride + rank % self.stride


def group(layout: Layout, name: GroupName) -> Group:
    """Return the shape of the groups of one kind."""
    split = layout.degrees
    tp, cp, dp, pp, ep, etp = split.tp, split.cp, split.dp, split.pp, split.ep, split.etp
    stage = tp * cp * dp
    shapes = {
        "tp": (tp, 1),
        "cp": (cp, tp),
        "dp": (dp, tp * cp),
        "dp_cp": (dp * cp, tp),
        "pp": (pp, stage),
        "etp": (etp, 1),
        "ep": (ep, etp),
        "tp_ep": (etp * ep, 1),
        "edp": (stage // (etp * ep), etp * ep),
    }
    return Group(*shapes[name])


def first_ranks(shape: Group, world_size: int) -> list[int]:
    """Return the lowest rank of every group of this shape in the world."""
    block = shape.size * shape.stride
    return [start + offset for start in range(0, world_size, block) for offset in range(shape.stride)]


class Span(NamedTuple):
    """How a group is spread over domains (nodes, or NVLink domains)."""

    domains: int
    """Domains that the worst placed group touches."""
    members: int
    """Members of that group in the domain with the fewest, which share the domain's links to the others."""
    largest: int
    """Members of that group in the domain with the most."""


@lru_cache(maxsize=65536)
def span(shape: Group, domain_size: int) -> Span:
    """Return the spread of the worst placed group over domains of `domain_size` consecutive ranks."""
    block = shape.size * shape.stride
    if shape.size == 1 or (domain_size % block == 0):
        return Span(1, shape.size, shape.size)
    if shape.stride % domain_size == 0:
        return Span(shape.size, 1, 1)
    if domain_size % shape.stride == 0 and block % domain_size == 0:
        members = domain_size // shape.stride
        return Span(shape.size // members, members, members)
    # The sizes do not divide each other: walk the groups until their position in the domain repeats. The world is a
    # multiple of both sizes, so each of these positions occurs in it.
    worst = Span(1, shape.size, shape.size)
    for first in first_ranks(shape, math.lcm(block, domain_size)):
        by_domain = Counter(rank // domain_size for rank in shape.ranks(first)).values()
        here = Span(len(by_domain), min(by_domain), max(by_domain))
        if (here.domains, -here.members) > (worst.domains, -worst.members):
            worst = here
    return worst
