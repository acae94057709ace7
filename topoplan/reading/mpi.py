"""How many processes `mpirun` starts, and how many of them on each node.

Sources: mpirun(1) of Open MPI 5; mpiexec of Hydra (MPICH, Intel MPI).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topoplan.reading.setup import Launch

MPI = frozenset(["mpirun", "mpiexec"])
"""The programs of MPI that start processes on several nodes."""
_COUNTS = frozenset(["-np", "--np", "-n", "--n", "-c"])
_PER_NODE = frozenset(["-N", "-npernode", "--npernode", "-ppn", "-perhost"])
_MAPPED = re.compile(r"ppr:(\d+):node(?::.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiProcesses:
    """Numbers of processes; None if the options do not give one, or the shell expands it."""

    count: int | None = None
    per_node: int | None = None


def mpi_of(launch: Launch) -> MpiProcesses | None:
    """Return what the mpirun of a command starts; None if it has none."""
    words = launch.words_of(*MPI)
    if words is None:
        return None
    count: int | None = None
    per_node: int | None = None
    for word, value in zip_longest(words, words[1:], fillvalue=""):
        if word in _COUNTS:
            count = _whole(value)
        elif word in _PER_NODE:
            per_node = _whole(value)
        elif word in ("-pernode", "--pernode"):
            per_node = 1
        elif match := _MAPPED.fullmatch(word.removeprefix("--map-by=")):
            per_node = int(match[1][:6])
    return MpiProcesses(count=count, per_node=per_node)


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None
