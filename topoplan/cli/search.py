"""Running the search with its progress on the terminal."""

from __future__ import annotations

import signal
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from topoplan.cli.interrupts import Interrupts
from topoplan.cli.kept_searches import KeptSearches, searches_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from topoplan.planner.plan import Ranking
    from topoplan.specs.spec import Spec


def search(
    spec: Spec,
    *,
    fresh: bool,
    keep_rejected: bool = False,
    best_only: bool = False,
    with_room: bool = False,
    partial: bool = False,
) -> Ranking:
    """`planner.search.rank`, with a line on stderr when it takes long and a person is looking.

    A whole search of before is its own answer, unless it has to be a fresh one. One that keeps every rejected layout
    is not kept, and one for the best plan only is an answer to its like alone. `partial`: the first Ctrl-C ends the
    search with what it has, and only a second one the program.
    """
    how = "best with room" if with_room else "best only" if best_only else ""
    kept = None if fresh or keep_rejected else KeptSearches(searches_directory(), how)
    if kept and (known := kept.find(spec)):
        return known

    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    interrupts = Interrupts(spared=1, then=signal.default_int_handler)
    with ProgressLine(partial=partial) as line, interrupts if partial else nullcontext():

        def progress(done: int, total: int) -> bool:
            line(done, total)
            return interrupts.count > 0

        ranking = rank(spec, progress=progress, keep_rejected=keep_rejected, best_only=best_only, with_room=with_room)
    if kept:
        kept.keep(ranking)
    return ranking


@contextmanager
def searches(count: int, *, fresh: bool) -> Iterator[Callable[[Spec], Ranking]]:
    """The same for `count` searches at most, which share one line; none of them is done twice."""
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    kept = KeptSearches(None if fresh else searches_directory())
    done = -1

    def search_next(spec: Spec) -> Ranking:
        nonlocal done
        done += 1
        if known := kept.find(spec):
            return known
        ranking = rank(spec, progress=report if line.visible else None)
        kept.keep(ranking)
        return ranking

    def report(position: int, total: int) -> None:
        line(done * total + position, count * total)

    with ProgressLine() as line:
        yield search_next
