"""Find the rank that the others waited for when collectives timed out: the one that wrote no timeout of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.run.rank_lines import RankLine

_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: .*Timeout\(ms\)=(?P<nccl>[0-9]+)"
    r"|Timed out waiting (?P<gloo>[0-9]+)ms for (?:recv|send) operation|wait timeout after (?P<wait>[0-9]+)ms"
)
"""What a rank writes that was waiting itself. The watchdog of a hanging rank is a separate thread, so it may well
report that it was told of another rank's timeout.
"""
_PEER_GONE = re.compile(r"Connection (?:closed|reset) by (?:remote )?peer|ncclRemoteError|[Bb]roken pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedFor:
    """Ranks of one node that were not there."""

    node: int
    ranks: tuple[int, ...]
    waited_ms: int
    """How long the other ranks waited."""
    waited: int
    """Number of ranks that reported a timeout."""
    evidence: tuple[str, ...]
    """The last line of the absent ranks, if any, and the message of the first rank that waited."""


def waited_for(lines: Mapping[int, Sequence[RankLine]], ranks_per_node: int) -> WaitedFor | None:
    """Return the ranks that the others waited for, from the last lines of all nodes.

    None if nobody timed out, or if the ranks that did not are too many or on several nodes. A rank that lost its peers
    was there: another one was not. If all other ranks timed out, that rank may be the late one.
    """
    timed_out: dict[int, tuple[int, str]] = {}
    gone: set[int] = set()
    for node, some in lines.items():
        own = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        for line in some:
            late, lost = _TIMED_OUT.search(line.text), _PEER_GONE.search(line.text)
            if late is None and lost is None:
                continue
            rank = line.rank_of(node, ranks_per_node)
            ranks = own if rank is None else (rank,)
            if late is not None:
                said = int(next(filter(None, late.groups())))
                timed_out |= {rank: (said, line.text) for rank in ranks if rank not in timed_out}
            else:
                gone |= set(ranks)
    everyone = {rank for node in lines for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node)}
    quiet = everyone - set(timed_out) - gone or everyone - set(timed_out)
    nodes = {rank // ranks_per_node for rank in quiet}
    if not timed_out or len(nodes) != 1 or 2 * len(quiet) > len(everyone):
        return None
    node = nodes.pop()
    last = [line.text for line in lines[node] if line.rank_of(node, ranks_per_node) in quiet and line.text.strip()]
    waited_ms, evidence = timed_out[min(timed_out)]
    return WaitedFor(
        node=node,
        ranks=tuple(sorted(quiet)),
        waited_ms=waited_ms,
        waited=len(timed_out),
        evidence=(*last[-1:], evidence),
    )
