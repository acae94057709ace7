"""Running the search with its progress on the terminal."""

from __future__ import annotations

import signal
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from topoplan.cli.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from topoplan.planner.plan import Ranking
    from topoplan.specs.spec import Spec


def search(spec: Spec, *, keep_rejected: bool = False, partial: bool = False) -> Ranking:
    """`planner.search.rank`, with a line on stderr when it takes long and a person is looking.

    `partial`: the first Ctrl-C ends the search with what it has, and only a second one the program.
    """
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    interrupts = Interrupts(spared=1, then=signal.default_int_handler)
    with ProgressLine(partial=partial) as line, interrupts if partial else nullcontext():

        def progress(done: int, total: int) -> bool:
            line(done, total)
            return interrupts.count > 0

        return rank(spec, progress=progress, keep_rejected=keep_rejected)


@contextmanager
def searches(count: int) -> Iterator[Callable[[Spec], Ranking]]:
    """The same for `count` searches at most, which share one line."""
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    done = -1

    def search_next(spec: Spec) -> Ranking:
        nonlocal done
        done += 1
        return rank(spec, progress=report if line.visible else None)

    def report(position: int, total: int) -> None:
        line(done * total + position, count * total)

    with ProgressLine() as line:
        yield search_next
