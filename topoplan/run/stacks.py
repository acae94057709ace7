"""Where the ranks of a run are in their programs, as py-spy reports it, and which of them are elsewhere.

Ranks that the operating system does not let run are found without py-spy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from topoplan.remote.connection import Connection
from topoplan.run import programs
from topoplan.run.node import job_words, key_values
from topoplan.run.record import Started
from topoplan.run.shown import shown_line
from topoplan.units import named

Stacks = Mapping[int, Sequence[str]]
"""Frames by global rank, such as `fetch (data.py:12)`, innermost first; before them, why a rank cannot run."""

GONE = "gone: its process no longer exists"
_BLOCKED = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a file system"}
"""By process state, as in proc_pid_stat(5)."""
_LIFE = re.compile(r"topoplan:life=(?P<life>[A-Za-z])")
_RANK = re.compile(r"topoplan:rank=(?P<rank>[0-9]{1,9})")
_PROCESS = re.compile(r"Process (?P<pid>[0-9]{1,9}):")
_THREAD = re.compile(r'Thread (?P<id>\S+) [^"]*(?:"(?P<name>[^"]*)")?$')
"""The name is there once the program has used its threads."""
_COLLECTIVE = re.compile(r"\((?:\S*/)?(?:distributed_c10d|c10d_logger|_functional_collectives)\.py:")
_ALIKE = 3
"""Ranks are at the same place if this many of their innermost functions agree."""
_SHOWN_FRAMES = 6
_SHOWN_GROUPS = 3


OBSERVED_S = 3.0
"""How long the writes of a job are observed."""


def inspect_ranks(
    connection: Connection, run_dir: str, *, started: Started | None, deadline_s: float
) -> tuple[dict[int, list[str]], int]:
    """Return the stacks of one node's ranks, and the bytes that its job wrote in `OBSERVED_S`.

    Stacks are empty without py-spy, or if it lacks permission. Raises HostError, as `node_state`.
    """
    done = connection.run(programs.STACKS, *job_words(run_dir, started), deadline_s=deadline_s)
    written = key_values(done).get("written", "")
    return main_threads(done.stdout), int(written) if written.isdecimal() else 0


def main_threads(said: bytes) -> dict[int, list[str]]:
    """Parse the main thread's stack of each rank from the output of stacks.sh."""
    found: dict[int, list[str]] = {}
    frames: list[str] | None = None
    rank, pid = -1, ""
    for line in map(shown_line, said.split(b"\n")):
        if match := _RANK.fullmatch(line):
            rank, frames = int(match["rank"]), None
            found[rank] = []
        elif match := _LIFE.fullmatch(line):
            found.setdefault(rank, []).extend(filter(None, [_BLOCKED.get(match["life"])]))
        elif match := _PROCESS.match(line):
            pid = match["pid"]
        elif match := _THREAD.match(line):
            is_main = rank >= 0 and (match["name"] == "MainThread" or match["id"] == pid)
            frames = found[rank] if is_main else None
        elif frames is not None and line.startswith("    "):
            frames.append(line.strip())
    return found


def outlying_ranks(stacks: Stacks) -> tuple[int, ...]:
    """Return the ranks that the others seem to wait for.

    Those that cannot run; else those in no collective while others are in one; else the smallest group.
    """
    blocked = tuple(sorted(rank for rank, frames in stacks.items() if frames and _is_blocked(frames[0])))
    if 0 < len(blocked) < len(stacks):
        return blocked
    together = _groups(stacks)
    if len(together) < 2:
        return ()
    out = [ranks for ranks in together if not any(map(_COLLECTIVE.search, stacks[ranks[0]]))]
    fewest, next_one = together[0], together[1]
    if 0 < len(out) < len(together):
        return tuple(sorted(rank for ranks in out for rank in ranks))
    return fewest if len(fewest) < len(next_one) else ()


def place_text(frames: Sequence[str]) -> str:
    """Return where a rank is: `is in fetch (data.py:12)`, or what keeps it from running."""
    return f"is {'' if _is_blocked(frames[0]) else 'in '}{frames[0]}"


def _is_blocked(frame: str) -> bool:
    return frame == GONE or frame in _BLOCKED.values()


def with_missing_ranks(stacks: dict[int, list[str]], ranks: range) -> dict[int, list[str]]:
    """Add the ranks of a node that have no process; unchanged if none is known, because ranks then have no numbers."""
    return {rank: stacks.get(rank, [GONE]) for rank in ranks} if set(stacks) & set(ranks) else stacks


def stack_lines(stacks: Stacks) -> Iterator[str]:
    """Yield the stacks for a human reader: ranks that are elsewhere come first, with more frames."""
    apart = outlying_ranks(stacks)
    together = sorted(_groups(stacks), key=lambda ranks: (not set(ranks) <= set(apart), len(ranks)))
    for ranks in together[:_SHOWN_GROUPS]:
        who = f"rank{'s' if len(ranks) > 1 else ''} {named(map(str, ranks), 8)}"
        inner, *outer = stacks[ranks[0]][: _SHOWN_FRAMES if set(ranks) <= set(apart) else 2]
        yield f"{who}: {inner}"
        yield from (f"  in {frame}" for frame in outer)
    if len(together) > _SHOWN_GROUPS:
        yield f"and {len(together) - _SHOWN_GROUPS} more places"


def _groups(stacks: Stacks) -> list[tuple[int, ...]]:
    found: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, frames in sorted(stacks.items()):
        if frames:
            found[tuple(frame.partition(" (")[0] for frame in frames[:_ALIKE])].append(rank)
    return sorted(map(tuple, found.values()), key=len)
