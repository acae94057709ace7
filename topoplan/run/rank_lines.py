"""Lines of ranks: the prefixes that torchrun and torch put before them, and which rank the others waited for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LONGEST = 2000
"""Of a longer line only the two ends are read."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_PREFIX = re.compile(r"(?:\[(?!rank)[a-z_]+(?P<local>[0-9]{1,6})\]: ?)?(?:\[rank(?P<rank>[0-9]{1,9})\]: ?)?")
"""`[default1]:` is torchrun's (--tee), with the local rank; `[rank3]: ` torch's, for what a rank writes at its end."""


@dataclass(frozen=True, slots=True)
class RankLine:
    """A line without its prefixes."""

    text: str
    local: int | None
    """Local rank, if torchrun's prefix names it."""
    rank: int | None
    """Global rank, if torch's prefix names it."""

    @property
    def writer(self) -> tuple[int | None, int | None]:
        """Key that distinguishes the lines of one rank from those of others on its node."""
        return self.local, self.rank

    def rank_of(self, node: int, ranks_per_node: int) -> int | None:
        """Return the global rank; None if no prefix names it."""
        if self.rank is None and self.local is not None:
            return node * ranks_per_node + self.local
        return self.rank


def both_ends(line: str) -> str:
    """Return the line, without its middle if it is very long."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def rank_line(text: str) -> RankLine:
    """Parse one line."""
    text = _CONTROL.sub("", both_ends(text.rstrip("\r\n").rpartition("\r")[2]))
    match = _PREFIX.match(text)
    if match is None or not match[0]:
        return RankLine(text, None, None)
    local, rank = match["local"], match["rank"]
    return RankLine(text[match.end() :], int(local) if local else None, int(rank) if rank else None)


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
    """Return the ranks that the others waited for when collectives timed out: those that wrote no timeout of their own.

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
