"""What each kind of communication group of a layout crosses, and what its members get."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.cost.collectives import member_bytes_per_s
from topoplan.cost.profile import profile_of
from topoplan.layout.layout import Layout
from topoplan.layout.placement import Group, GroupName, group, span
from topoplan.layout.topology import local_ranks
from topoplan.layout.traffic import Crossing, Pattern, worst_group
from topoplan.specs.cluster import Cluster
from topoplan.specs.profile import OwnProfile

PATTERNS: dict[GroupName, Pattern] = {
    "tp": "ring",
    "cp": "neighbour",
    "dp": "ring",
    "dp_cp": "ring",
    "ep": "all-to-all",
    "etp": "ring",
    "edp": "ring",
    "pp": "neighbour",
}
"""How the members of a group mostly talk: tensor and data parallel gather, scatter and reduce around rings, context
parallel passes keys and values on, expert parallel exchanges tokens, stages hand over activations. Gradients are
reduced over dp_cp, which is dp where cp is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinks:
    """All groups of one kind, and the worst placed of them."""

    name: GroupName
    pattern: Pattern
    shape: Group
    groups: int
    """How many there are in the cluster."""
    first: tuple[int, ...]
    """Ranks of the first group."""
    worst: tuple[int, ...]
    """Ranks of the worst placed group; the first of them where several are alike."""
    domains: int
    """NVLink domains, or nodes without NVLink, that it touches."""
    crossings: tuple[Crossing, ...]
    """Of each kind of link that it crosses, the tightest."""
    tightest: Crossing
    member_bytes_per_s: float
    """What one member sends in a second, with what NCCL reaches of the links."""


def group_links(cluster: Cluster, layout: Layout, own: OwnProfile | None = None) -> tuple[GroupLinks, ...]:
    """A row for each kind that has more than one member; `own` constants lie over those of the GPU."""
    rows = []
    for name, pattern in PATTERNS.items():
        shape = group(layout, name)
        # Without a grid of their own the experts' gradients are reduced with the others.
        same = (name == "dp_cp" and layout.cp == 1) or (name == "edp" and layout.ep == layout.etp == 1)
        if shape.size == 1 or same:
            continue
        worst = worst_group(shape, pattern, cluster)
        spread = span(shape, local_ranks(cluster))
        sending = 1 if pattern == "neighbour" else spread.members
        crossings = (*worst.traffic.inside, *worst.traffic.between)
        rows.append(
            GroupLinks(
                name=name,
                pattern=pattern,
                shape=shape,
                groups=layout.world_size // shape.size,
                first=tuple(shape.ranks(0)),
                worst=tuple(shape.ranks(worst.first_rank)),
                domains=len({rank // local_ranks(cluster) for rank in shape.ranks(worst.first_rank)}),
                crossings=crossings,
                tightest=min(crossings, key=lambda one: one.member_bytes_per_s),
                member_bytes_per_s=member_bytes_per_s(worst.traffic, sending, cluster, profile_of(cluster.gpu, own)),
            )
        )
    return tuple(rows)
