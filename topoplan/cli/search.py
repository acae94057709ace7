"""Running the search with its progress on the terminal."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from topoplan.planner.plan import Ranking
    from topoplan.specs.spec import Spec


def search(spec: Spec, *, keep_rejected: bool = False, partial: bool = False) -> Ranking:
    """`planner.search.rank`, with a line on stderr when it takes long and a person is looking.

    `partial`: the first Ctrl-C ends the search with what it has, and only a second one the program.
    """
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    with ProgressLine(partial=partial) as line, _interrupts(partial) as interrupted:

        def progress(done: int, total: int) -> bool:
            line(done, total)
            return bool(interrupted)

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


@contextmanager
def _interrupts(wanted: bool) -> Iterator[list[int]]:
    """A list that the first SIGINT puts something into; the next one is Python's usual KeyboardInterrupt."""
    received: list[int] = []
    if not wanted:
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
