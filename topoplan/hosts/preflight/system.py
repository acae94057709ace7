"""Checks of a machine's memory, limits and clock."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.hosts.preflight.fleet import Fleet, Node, names
from topoplan.hosts.result import Result, failure, ok, skipped, warning
from topoplan.units import format_gib, format_seconds

_SHM_BYTES = 2**30
"""NCCL and data loader workers share memory in /dev/shm; Docker's default is 64 MiB (nccl#290, torchtitan#853)."""
_MEMLOCK_BYTES = 64 * 2**20
"""Below this, not even NCCL's first queues of a few adapters can be registered; systemd's default is 8 MiB."""
_SKEW_S = 5.0
"""Training does not depend on the clock, but comparing logs of several nodes and caches on shared storage do."""
_CLOCK_STEP_S = 1.0
"""Resolution of `date`: the clock may be ahead of its output by this much."""
_SAME_MEMORY = 0.1
"""The kernel shows up to this fraction less memory than is installed."""
_REMEDY = "start chrony or ntpd"
_THIS_MACHINE = -1
"""In the place of a host's number."""

_Span = tuple[float, float]
"""Bounds of a clock minus ours, in seconds."""


def cpu_cores(fleet: Fleet, node: Node) -> Result:
    """Fewer cores than ranks, or than in the spec, from which the node scripts derive OMP_NUM_THREADS."""
    cores, wanted = node.facts.cpu_cores, fleet.cluster.cpu_cores
    if cores is None:
        return node.not_reported("cpu_cores")
    if cores < fleet.cluster.gpus_per_node:
        return warning(
            f"{cores} CPU cores for {fleet.cluster.gpus_per_node} GPUs", "each rank keeps a core busy; use larger hosts"
        )
    if wanted is not None and cores < wanted:
        return warning(f"{cores} CPU cores, and the spec has {wanted}", f"write cpu_cores: {cores} in the spec")
    return ok(f"{cores} CPU cores")


def host_memory(fleet: Fleet, node: Node) -> Result:
    """Host memory for what a plan offloads, within the limit of the container or slice (cgroup)."""
    facts, needs, said = node.facts, fleet.needs, fleet.cluster.host_memory_bytes
    if facts.memory_available_bytes is None and facts.memory_bytes is None:
        return node.not_reported("memory_bytes")
    limit = facts.cgroup_memory_bytes
    available = facts.memory_available_bytes if facts.memory_available_bytes is not None else facts.memory_bytes or 0
    usable = available if limit is None else min(available, limit)
    words = f"{format_gib(usable)} of memory available" + (" (limit of its cgroup)" if usable == limit else "")
    if needs is not None and needs.host_bytes > usable:
        return failure(
            f"{words}, and the plan offloads {format_gib(needs.host_bytes)} a node",
            "free memory or raise the limit, or plan with less: host_memory in the spec, or --pin"
            " optimizer_offload_fraction=0",
        )
    whole = min(facts.memory_bytes or usable, limit or facts.memory_bytes or usable)
    if said is not None and whole < (1 - _SAME_MEMORY) * said:
        return warning(
            f"{format_gib(whole)} of memory, and the spec has {format_gib(said)}", "correct host_memory in the spec"
        )
    return ok(words)


def shm(fleet: Fleet, node: Node) -> Result:
    """Row 14: /dev/shm too small for NCCL and the data loader workers."""
    whole, free = node.facts.shm_bytes, node.facts.shm_free_bytes
    if whole is None:
        return node.not_reported("shm_bytes")
    if whole < _SHM_BYTES:
        remedy = "mount it larger: `mount -o remount,size=16G /dev/shm`, as root"
        if node.facts.in_container:
            remedy = "start the container with --ipc=host, or with --shm-size=16g"
        what = f"/dev/shm has {whole / 2**20:.0f} MiB, and NCCL and data loading take up to 1 GiB"
        # A single GPU shares nothing with another one in the same machine.
        return (failure if fleet.cluster.gpus_per_node > 1 else warning)(what, remedy)
    if free is not None and free < _SHM_BYTES:
        return failure(
            f"{free / 2**20:.0f} MiB of {format_gib(whole)} free in /dev/shm",
            "see what is there (`ls -la /dev/shm`): files of runs that were killed can be removed",
        )
    return ok(f"{format_gib(whole if free is None else free)} free")


def memlock(fleet: Fleet, node: Node) -> Result | None:
    """Row 15: RDMA pins memory, within the limit of the session that starts the run, as far as a script can raise
    it."""
    if not fleet.uses_rdma:
        return None
    limit = node.facts.memlock_bytes
    if limit is None:
        return node.not_reported("memlock_bytes")
    if limit < 0:
        return ok("unlimited")
    remedy = "`* - memlock unlimited` in /etc/security/limits.conf, or LimitMEMLOCK=infinity for the SSH service"
    if node.facts.in_container:
        remedy = "start the container with --ulimit memlock=-1"
    what = f"a session may lock {limit / 2**20:.4g} MiB of memory"
    return (failure if limit < _MEMLOCK_BYTES else warning)(f"{what}, and RDMA pins its buffers", remedy)


def clock(fleet: Fleet, node: Node) -> Result | None:
    """Clocks that differ from each other by more than the round trips explain.

    Hosts are compared in pairs: a median would blame both of two, and hide half of what they differ by. A host is
    blamed only where most clocks agree without it; this machine's clock is asked where the hosts' alone do not decide.
    """
    if len(fleet.nodes) < 2 or node.query_times_s is None:
        return None
    if node.facts.clock_s is None:
        return node.not_reported("clock_s")
    spans = {other.number: span for other in fleet.nodes if (span := _offset(other)) is not None}
    if len(spans) < 2:
        return skipped("no other host's clock is known")
    if len(agreeing := _largest_agreement(spans)) == len(spans):
        return ok("in step with the other hosts")
    with_ours = spans | {_THIS_MACHINE: (0.0, 0.0)}
    broken_tie = not agreeing and bool(agreeing := _largest_agreement(with_ours))
    if node.number in agreeing:
        return ok("in step with this machine" if broken_tie else "in step with most hosts")
    if agreeing:
        ahead_s = max((_ahead(spans[node.number], with_ours[number]) for number in agreeing), key=abs)
        those = f"{names(one for one in fleet.nodes if one.number in agreeing)} and this machine"
        return warning(f"its clock is {_by(ahead_s)} {those if broken_tie else 'the others'}", f"{_REMEDY} there")
    known = [other for other in fleet.nodes if other.number in spans]
    ahead_s, farthest = max(
        ((_ahead(spans[node.number], spans[other.number]), other.name) for other in known), key=lambda one: abs(one[0])
    )
    if abs(ahead_s) <= _SKEW_S:
        return ok("in step with every other host, which others are not")
    return warning(f"its clock is {_by(ahead_s)} {farthest}: either may be the wrong one", f"{_REMEDY} on all hosts")


def _by(ahead_s: float) -> str:
    return f"{format_seconds(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"


def _ahead(one: _Span, other: _Span) -> float:
    """Return by how many seconds a clock is at least ahead of another one (negative: behind); 0 if it may be equal."""
    return max(0.0, one[0] - other[1]) - max(0.0, other[0] - one[1])


def _largest_agreement(spans: Mapping[int, _Span]) -> frozenset[int]:
    """Return the hosts of the largest group in which no two clocks are apart; empty unless these are more than half of
    all, and the only such group.

    Clocks that are pairwise in step have a point in common once their bounds are widened by half of what is allowed.
    """
    bounds = [(low - _SKEW_S / 2, False, number) for number, (low, _) in spans.items()]
    bounds += [(high + _SKEW_S / 2, True, number) for number, (_, high) in spans.items()]
    inside: set[int] = set()
    groups: list[frozenset[int]] = []
    grew = False
    for _, is_end, number in sorted(bounds):
        if is_end and grew and 2 * len(inside) > len(spans):
            groups.append(frozenset(inside))
        grew = not is_end
        (inside.remove if is_end else inside.add)(number)
    most = max(map(len, groups), default=0)
    largest = [group for group in groups if len(group) == most]
    return largest[0] if len(largest) == 1 else frozenset()


def _offset(node: Node) -> _Span | None:
    """Return bounds of the host's clock minus ours, in seconds: it was read between question and answer."""
    if node.facts.clock_s is None or node.query_times_s is None:
        return None
    sent, answered = node.query_times_s
    return node.facts.clock_s - answered, node.facts.clock_s + _CLOCK_STEP_S - sent
