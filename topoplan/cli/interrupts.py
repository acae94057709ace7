"""Ctrl-C while hosts work, or while a search runs."""

from __future__ import annotations

import signal
from typing import Any


class Interrupts:
    """Counts Ctrl-C in place of being ended by it. After the `spared` ones the next is for `then`."""

    def __init__(self, spared: int = 3, then: Any = signal.SIG_DFL) -> None:
        """None yet."""
        self.count = 0
        self._spared, self._then = spared, then
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # in the background of a shell script, Ctrl-C is for others
            signal.signal(signal.SIGINT, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    def _count(self, *_: object) -> None:
        # Nothing else: a handler runs between two steps of whatever the main thread does.
        self.count += 1
        if self.count >= self._spared:
            signal.signal(signal.SIGINT, self._then)
