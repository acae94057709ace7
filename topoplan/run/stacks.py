"""Where the ranks of a run are in their programs, by py-spy where hosts have it, and which of them is elsewhere; those
that the system does not let run are known without it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.remote.connection import Connection
from topoplan.run import programs
from topoplan.run.node import job_words, key_values
from topoplan.run.record import Started
from topoplan.run.shown import shown_line
from topoplan.units import named

Stacks = Mapping[int, Sequence[str]]
"""By rank over all nodes: functions with their places, such as `fetch (data.py:12)`, the innermost first. Before them,
of a rank that does not run, what keeps it from that."""

GONE = "gone: it has no process any more"
_KEPT = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a file system"}
"""By the state of a process, as proc_pid_stat(5) has it."""
_LIFE = re.compile(r"topoplan:life=(?P<life>[A-Za-z])")
_RANK = re.compile(r"topoplan:rank=(?P<rank>[0-9]{1,9})")
_PROCESS = re.compile(r"Process (?P<pid>[0-9]{1,9}):")
_THREAD = re.compile(r'Thread (?P<id>\S+) [^"]*(?:"(?P<name>[^"]*)")?$')
"""Named once the program has used its threads."""
_COLLECTIVE = re.compile(r"\((?:\S*/)?(?:distributed_c10d|c10d_logger|_functional_collectives)\.py:")
_ALIKE = 3
"""Ranks are at the same place where so many of their innermost functions are the same."""
_SHOWN_FRAMES = 6
_SHOWN_GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """At the job of one node."""

    stacks: dict[int, list[str]] = field(default_factory=dict)
    """Of its ranks; without functions where there is no py-spy, or it may not look."""
    written_bytes: int = 0
    """What it wrote in the `WRITES_S` in which it was looked at."""


WRITES_S = 3.0


def look_at_ranks(connection: Connection, run_dir: str, *, started: Started | None, deadline_s: float) -> Look:
    """How the ranks on one node are.

    Raises:
        HostError: `lost`, `deadline`, or `command`: the host cannot say.
    """
    done = connection.run(programs.STACKS, *job_words(run_dir, started), deadline_s=deadline_s)
    written = key_values(done).get("written", "")
    return Look(stacks=main_threads(done.stdout), written_bytes=int(written) if written.isdecimal() else 0)


def main_threads(said: bytes) -> dict[int, list[str]]:
    """What py-spy said of each rank, behind a line of ours that names it."""
    found: dict[int, list[str]] = {}
    frames: list[str] | None = None
    rank, pid = -1, ""
    for line in map(shown_line, said.split(b"\n")):
        if match := _RANK.fullmatch(line):
            rank, frames = int(match["rank"]), None
            found[rank] = []
        elif match := _LIFE.fullmatch(line):
            found.setdefault(rank, []).extend(filter(None, [_KEPT.get(match["life"])]))
        elif match := _PROCESS.match(line):
            pid = match["pid"]
        elif match := _THREAD.match(line):
            is_main = rank >= 0 and (match["name"] == "MainThread" or match["id"] == pid)
            frames = found[rank] if is_main else None
        elif frames is not None and line.startswith("    "):
            frames.append(line.strip())
    return found


def elsewhere(stacks: Stacks) -> tuple[int, ...]:
    """Whom the others seem to wait for: ranks that do not run, or that are in no collective where others are in one, or
    else the fewest."""
    kept = tuple(sorted(rank for rank, frames in stacks.items() if frames and _is_kept(frames[0])))
    if 0 < len(kept) < len(stacks):
        return kept
    together = _groups(stacks)
    if len(together) < 2:
        return ()
    out = [ranks for ranks in together if not any(map(_COLLECTIVE.search, stacks[ranks[0]]))]
    fewest, next_one = together[0], together[1]
    if 0 < len(out) < len(together):
        return tuple(sorted(rank for ranks in out for rank in ranks))
    return fewest if len(fewest) < len(next_one) else ()


def is_where(frames: Sequence[str]) -> str:
    """`is in fetch (data.py:12)`, or what keeps it from running."""
    return f"is {'' if _is_kept(frames[0]) else 'in '}{frames[0]}"


def _is_kept(frame: str) -> bool:
    return frame == GONE or frame in _KEPT.values()


def with_gone(stacks: dict[int, list[str]], ranks: range) -> dict[int, list[str]]:
    """Those of one node, which is to have these; where none is known, they are not called by numbers there."""
    return {rank: stacks.get(rank, [GONE]) for rank in ranks} if set(stacks) & set(ranks) else stacks


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
