"""Whom the others waited for, where collectives timed out: the rank that wrote no timeout, because it was not there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.run.rank_lines import RankLine

_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: .*Timeout\(ms\)=(?P<nccl>[0-9]+)"
    r"|Timed out waiting (?P<gloo>[0-9]+)ms for (?:recv|send) operation|wait timeout after (?P<wait>[0-9]+)ms"
)
"""What a rank writes that waited itself. The watchdog of one that hangs is a thread of its own: it may well say that it
was told of the timeout of another."""
_PEER_GONE = re.compile(r"Connection (?:closed|reset) by (?:remote )?peer|ncclRemoteError|[Bb]roken pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedFor:
    """Ranks of one node that were not there."""

    node: int
    ranks: tuple[int, ...]
    waited_ms: int
    """How long the others did."""
    waited: int
    """How many of them wrote that."""
    evidence: tuple[str, ...]
    """The last line of those that were not there, if any, and what the first that waited wrote."""


def waited_for(lines: Mapping[int, Sequence[RankLine]], ranks_per_node: int) -> WaitedFor | None:
    """Read from the last lines of all nodes; None where nobody timed out, or those who did not are many or apart.

    A rank that lost its peers was there: another was not. Where all others timed out it may be the one that came late.
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
