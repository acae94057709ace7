"""Running the search with its progress on the terminal."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topoplan.planner.plan import Ranking
    from topoplan.specs.spec import Spec


def search(spec: Spec, *, keep_rejected: bool = False, partial: bool = False) -> Ranking:
    """`planner.search.rank`, with a line on stderr when it takes long and a person is looking.

    `partial`: the first Ctrl-C ends the search with what it has, and only a second one the program.
    """
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    # A search makes many small objects and no cycles: collecting garbage costs a tenth of its time and frees nothing.
    gc.disable()
    try:
        with ProgressLine() as line, _interrupts(partial) as interrupted:

            def progress(done: int, total: int) -> bool:
                line(done, total)
                return bool(interrupted)

            return rank(spec, progress=progress, keep_rejected=keep_rejected)
    finally:
        gc.enable()


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
