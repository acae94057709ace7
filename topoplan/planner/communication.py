"""Which links each kind of communication group of a layout crosses, and the bandwidth that its members get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.engines.account import Flow
from topoplan.engines.registry import engine_of
from topoplan.layout.layout import Layout
from topoplan.network.collectives import member_bytes_per_s
from topoplan.network.placement import Group, span
from topoplan.network.topology import LinkKind, local_ranks
from topoplan.network.traffic import LoadedLink, Pattern, worst_group
from topoplan.planner.account import time_account
from topoplan.planner.plan import Plan
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec

_PATTERNS: dict[str, Pattern] = {"cp": "neighbour", "pp": "neighbour", "ep": "all-to-all", "ulysses": "all-to-all"}
"""The main pattern of each kind of group: context parallelism passes keys and values on, stages pass on activations,
expert parallelism exchanges tokens and Ulysses heads. All others gather, scatter and reduce around rings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinks:
    """All groups of one kind, and the worst placed of them."""

    name: str
    pattern: Pattern
    shape: Group
    groups: int
    """Number of groups in the cluster."""
    worst: tuple[int, ...]
    """Ranks of the worst placed group; the first of several equally bad ones."""
    domains: int
    """NVLink domains, or nodes without NVLink, that the worst group touches."""
    links: tuple[LoadedLink, ...]
    """The tightest link of each kind that the worst group crosses; inside domains, then between them."""
    tightest: LoadedLink
    member_bytes_per_s: float
    """Rate at which one member sends, with the fraction of the link rates that NCCL reaches."""

    @property
    def first(self) -> tuple[int, ...]:
        """Ranks of the first group."""
        return tuple(self.shape.ranks(0))


def group_links(cluster: Cluster, layout: Layout, own: OwnProfile | None = None) -> tuple[GroupLinks, ...]:
    """Return a row for each kind of group with more than one member; `own` constants override those of the GPU."""
    shapes = engine_of(layout.backend).groups(layout, cluster).items()
    return tuple(_links(name, shape, cluster, layout, own) for name, shape in shapes if shape.size > 1)


def _links(name: str, shape: Group, cluster: Cluster, layout: Layout, own: OwnProfile | None) -> GroupLinks:
    by_heads = name == "cp" and layout.cp_comm_type == "a2a"
    pattern, local = _PATTERNS.get("ulysses" if by_heads else name, "ring"), local_ranks(cluster)
    first, loads = worst_group(shape, pattern, cluster)
    worst = tuple(shape.ranks(first))
    sending = 1 if pattern == "neighbour" else span(shape, local).members
    return GroupLinks(
        name=name,
        pattern=pattern,
        shape=shape,
        groups=layout.world_size // shape.size,
        worst=worst,
        domains=len({rank // local for rank in worst}),
        links=(*loads.inside, *loads.between),
        tightest=loads.tightest,
        member_bytes_per_s=member_bytes_per_s(loads, sending, cluster, profile_of(cluster.gpu, own)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlow:
    """What one kind of group sends in a step."""

    group: str
    """Name of the group in `GroupLinks`, or `embd`: the stages that hold the tied embedding."""
    flow: Flow
    member_bytes: float
    """Bytes that one GPU sends in a step."""
    link_bytes: Mapping[LinkKind, float]
    """For each kind of link that the worst placed group crosses, the bytes over the busiest link, one way."""


def step_flows(spec: Spec, plan: Plan, rows: Sequence[GroupLinks]) -> tuple[StepFlow, ...]:
    """Return the bytes of a step by flow, over the groups of `group_links`; for Megatron, of the slowest stage.

    A member of n sends (n - 1) / n of what is gathered, scattered or exchanged, and twice that of what is all-reduced;
    a message is sent whole (Thakur et al. 2005, section 4).
    """
    found = []
    for flow in time_account(spec, plan).sent:
        row = _row_of(flow, rows, spec, plan.layout)
        whole, kind, size = flow.times * flow.moment_bytes, flow.call.kind, flow.call.group.size
        share = 1.0 if kind == "send" else (size - 1) / size
        sent = whole * share * (2 if kind == "all-reduce" else 1)
        # The load of an exchange includes what a member keeps for itself; rings pass on everything that they send.
        loaded = whole if row.pattern == "all-to-all" else sent
        loads: dict[LinkKind, float] = {}
        for link in row.links:
            loads[link.kind] = max(loads.get(link.kind, 0.0), loaded * link.load)
        found.append(StepFlow(group=row.name, flow=flow, member_bytes=sent, link_bytes=loads))
    return tuple(found)


_GROUPS_AT = {"layers": ("tp", "cp", "ep", "etp", "ulysses"), "stages": ("pp",)}
_GROUPS_OF_STATES = ("dp", "dp_cp", "edp", "shards", "replicas", "tp")
"""Groups that communicate at all other moments; tp for adapters that are replicated on all of its ranks."""


def _row_of(flow: Flow, rows: Sequence[GroupLinks], spec: Spec, layout: Layout) -> GroupLinks:
    """Return the group that a flow belongs to. Groups of one shape are the same ranks, whatever their names."""
    exchanges = flow.call.kind == "all-to-all"
    for row in rows:
        is_theirs = row.name in _GROUPS_AT.get(flow.moment, _GROUPS_OF_STATES)
        if is_theirs and row.shape == flow.call.group and (row.pattern == "all-to-all") == exchanges:
            return row
    # Dispatch over both expert grids at once, and copies of a tied embedding, have no row of their own.
    return _links("ep" if exchanges else "embd", flow.call.group, spec.cluster, layout, spec.profile)
