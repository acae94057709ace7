"""Run searches, with their progress on the terminal."""

from __future__ import annotations

import signal
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from topoplan.cli.interrupts import Interrupts
from topoplan.cli.search_cache import SearchCache, searches_directory

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
    """Run `planner.search.rank`, with a progress line on standard error if it takes long on a terminal.

    A complete earlier search is reused unless `fresh`. Searches that keep every rejected layout are not cached, and a
    search for the best plan only answers questions of the same kind. With `partial`, the first Ctrl-C ends the search
    with what it has, and a second one ends the program.
    """
    how = "best with room" if with_room else "best only" if best_only else ""
    kept = None if fresh or keep_rejected else SearchCache(searches_directory(), how)
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
    """Provide a cached search for up to `count` specs, which share one progress line; none is searched twice."""
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    kept = SearchCache(None if fresh else searches_directory())
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
