"""Split a line of a node's output from the prefixes that torchrun and torch put before it, which name the rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 2000
"""Of a longer line only the two ends are read."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_PREFIX = re.compile(r"(?:\[(?!rank)[a-z_]+(?P<local>[0-9]{1,6})\]: ?)?(?:\[rank(?P<rank>[0-9]{1,9})\]: ?)?")
"""`[default1]:` comes from torchrun's --tee, with the local rank; `[rank3]: ` from torch, for what a rank writes at its
end.
"""


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
