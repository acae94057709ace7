"""Ctrl-C while hosts work."""

from __future__ import annotations

import signal
from typing import Any


class Interrupts:
    """Counts Ctrl-C in place of being ended by it. The fourth one ends the program as ever."""

    def __init__(self) -> None:
        """None yet."""
        self.count = 0
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
        if self.count > 2:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
