"""What each kind of communication group of a layout crosses, and what its members get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from topoplan.engines.account import Sent
from topoplan.engines.data_parallel.parameter_bytes import shards_of
from topoplan.layout.layout import Layout
from topoplan.network.collectives import member_bytes_per_s
from topoplan.network.placement import Group, GroupName, group, span
from topoplan.network.topology import LinkKind, local_ranks
from topoplan.network.traffic import Crossing, Pattern, worst_group
from topoplan.planner.account import time_account
from topoplan.planner.plan import Plan
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec

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

    name: str
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


def _megatron_shapes(layout: Layout) -> Iterator[tuple[str, Pattern, Group]]:
    for name, pattern in PATTERNS.items():
        shape = group(layout, name)
        # Without a grid of their own the experts' gradients are reduced with the others.
        same = (name == "dp_cp" and layout.cp == 1) or (name == "edp" and layout.ep == layout.etp == 1)
        if shape.size > 1 and not same:
            yield name, pattern, shape


def _sharded_shapes(layout: Layout, cluster: Cluster) -> Iterator[tuple[str, Pattern, Group]]:
    """Ranks of a sequence are neighbours; all ranks share states, those of a node with hybrid sharding."""
    world = layout.world_size
    shards = shards_of(layout, cluster.gpus_per_node).optimizer
    # Under ddp nothing is shared: all ranks are replicas.
    shapes: tuple[tuple[str, Pattern, Group], ...] = (
        ("ulysses", "all-to-all", Group(layout.ulysses, 1)),
        ("cp", "neighbour", Group(layout.cp, layout.ulysses)),
        ("shards", "ring", Group(shards, 1)),
        ("replicas", "ring", Group(world // shards, shards)),
    )
    for name, pattern, shape in shapes:
        if shape.size > 1:
            yield name, pattern, shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """What passes over the busiest link of a kind, one way."""

    kind: LinkKind
    step_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlow:
    """What one kind of group sends in a step."""

    group: str
    """The name of its `GroupLinks`, or `embd`: the stages that hold the tied embedding."""
    flow: Sent
    member_bytes: float
    """What one GPU sends in a step."""
    links: tuple[LinkBytes, ...]
    """For each kind of link that the worst placed group crosses."""


def step_flows(spec: Spec, plan: Plan, rows: Sequence[GroupLinks]) -> tuple[StepFlow, ...]:
    """Bytes of a step by flow, over the groups of `group_links`; of Megatron's stages, the slowest.

    A member of n sends (n - 1) / n of what is gathered, scattered or exchanged, and twice that of what is reduced for
    all; a message is sent whole (Thakur et al. 2005, section 4).
    """
    found = []
    for flow in time_account(spec, plan).sent:
        row = _row_of(flow, rows, spec, plan.layout)
        whole = flow.times * flow.moment_bytes
        share = 1.0 if flow.kind == "send" else (flow.shape.size - 1) / flow.shape.size
        sent = whole * share * (2 if flow.kind == "all-reduce" else 1)
        # Loads of an exchange count what a member keeps as sent; rings pass on all that they send.
        loaded = whole if row.pattern == "all-to-all" else sent
        loads: dict[LinkKind, float] = {}
        for one in row.crossings:
            loads[one.kind] = max(loads.get(one.kind, 0.0), one.load)
        links = tuple(LinkBytes(kind=kind, step_bytes=loaded * load) for kind, load in loads.items())
        found.append(StepFlow(group=row.name, flow=flow, member_bytes=sent, links=links))
    return tuple(found)


_GROUPS_AT = {"layers": ("tp", "cp", "ep", "etp", "ulysses"), "stages": ("pp",)}
_GROUPS_OF_STATES = ("dp", "dp_cp", "edp", "shards", "replicas", "tp")
"""Whose members talk at all other moments; tp about adapters that are whole on each of its ranks."""


def _row_of(flow: Sent, rows: Sequence[GroupLinks], spec: Spec, layout: Layout) -> GroupLinks:
    """The group that a flow is within. Groups of one shape are the same ranks, whatever their names."""
    exchanges = flow.kind == "all-to-all"
    for row in rows:
        is_theirs = row.name in _GROUPS_AT.get(flow.moment, _GROUPS_OF_STATES)
        if is_theirs and row.shape == flow.shape and (row.pattern == "all-to-all") == exchanges:
            return row
    # Dispatch over both grids of experts at once, and copies of a tied embedding, have no row of their own.
    name, pattern = ("ep", "all-to-all") if exchanges else ("embd", "ring")
    return _links(name, cast(Pattern, pattern), flow.shape, spec.cluster, layout, spec.profile)


def group_links(cluster: Cluster, layout: Layout, own: OwnProfile | None = None) -> tuple[GroupLinks, ...]:
    """A row for each kind that has more than one member; `own` constants lie over those of the GPU."""
    shapes = _megatron_shapes(layout) if layout.is_megatron else _sharded_shapes(layout, cluster)
    return tuple(_links(name, pattern, shape, cluster, layout, own) for name, pattern, shape in shapes)


def _links(
    name: str, pattern: Pattern, shape: Group, cluster: Cluster, layout: Layout, own: OwnProfile | None
) -> GroupLinks:
    worst = worst_group(shape, pattern, cluster)
    spread = span(shape, local_ranks(cluster))
    sending = 1 if pattern == "neighbour" else spread.members
    crossings = (*worst.traffic.inside, *worst.traffic.between)
    return GroupLinks(
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
