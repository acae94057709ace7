"""Where the ranks of a run are in their programs, by py-spy where hosts have it, and which of them is elsewhere."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from topoplan.remote.connection import Connection
from topoplan.run import programs
from topoplan.run.node import job_words
from topoplan.run.record import Started
from topoplan.run.shown import shown_line
from topoplan.units import named

Stacks = Mapping[int, Sequence[str]]
"""By rank over all nodes: functions with their places, such as `fetch (data.py:12)`, the innermost first."""

_RANK = re.compile(r"topoplan:rank=(?P<rank>[0-9]{1,9})")
_PROCESS = re.compile(r"Process (?P<pid>[0-9]{1,9}):")
_THREAD = re.compile(r'Thread (?P<id>\S+) [^"]*(?:"(?P<name>[^"]*)")?$')
"""Named once the program has used its threads."""
_COLLECTIVE = re.compile(r"\((?:\S*/)?(?:distributed_c10d|c10d_logger|_functional_collectives)\.py:")
_ALIKE = 3
"""Ranks are at the same place where so many of their innermost functions are the same."""
_SHOWN_FRAMES = 6
_SHOWN_GROUPS = 3


def node_stacks(
    connection: Connection, run_dir: str, *, started: Started | None, deadline_s: float
) -> dict[int, list[str]]:
    """Of the ranks on one node; none where there is no py-spy, or it may not look.

    Raises:
        HostError: `lost`, `deadline`, or `command`: the host cannot say.
    """
    done = connection.run(programs.STACKS, *job_words(run_dir, started), deadline_s=deadline_s)
    return main_threads(done.stdout)


def main_threads(said: bytes) -> dict[int, list[str]]:
    """What py-spy said of each rank, behind a line of ours that names it."""
    found: dict[int, list[str]] = {}
    frames: list[str] | None = None
    rank, pid = -1, ""
    for line in map(shown_line, said.split(b"\n")):
        if match := _RANK.fullmatch(line):
            rank, frames = int(match["rank"]), None
        elif match := _PROCESS.match(line):
            pid = match["pid"]
        elif match := _THREAD.match(line):
            is_main = rank >= 0 and (match["name"] == "MainThread" or match["id"] == pid)
            frames = found.setdefault(rank, []) if is_main else None
        elif frames is not None and line.startswith("    "):
            frames.append(line.strip())
    return found


def elsewhere(stacks: Stacks) -> tuple[int, ...]:
    """Whom the others seem to wait for: ranks in no collective where others are in one, or else the fewest."""
    together = _groups(stacks)
    if len(together) < 2:
        return ()
    out = [ranks for ranks in together if not any(map(_COLLECTIVE.search, stacks[ranks[0]]))]
    fewest, next_one = together[0], together[1]
    if 0 < len(out) < len(together):
        return tuple(sorted(rank for ranks in out for rank in ranks))
    return fewest if len(fewest) < len(next_one) else ()


def stack_lines(stacks: Stacks) -> Iterator[str]:
    """For a person: those that are elsewhere first, with more of where they are."""
    apart = elsewhere(stacks)
    together = sorted(_groups(stacks), key=lambda ranks: (not set(ranks) <= set(apart), len(ranks)))
    for ranks in together[:_SHOWN_GROUPS]:
        who = f"rank{'s' if len(ranks) > 1 else ''} {named(map(str, ranks), 8)}"
        inner, *outer = stacks[ranks[0]][: _SHOWN_FRAMES if set(ranks) <= set(apart) else 2]
        yield f"{who}: {inner}"
        yield from (f"  in {frame}" for frame in outer)
    if len(together) > _SHOWN_GROUPS:
        yield f"and {len(together) - _SHOWN_GROUPS} more places"


def _groups(stacks: Stacks) -> list[tuple[int, ...]]:
    """Ranks that are at the same place; the fewest first."""
    found: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, frames in sorted(stacks.items()):
        if frames:
            found[tuple(frame.partition(" (")[0] for frame in frames[:_ALIKE])].append(rank)
    return sorted(map(tuple, found.values()), key=len)
