"""Ctrl-C while hosts work, or while a search runs."""

from __future__ import annotations

import signal
from typing import Any

INTERRUPTED = 130
"""Exit code: 128 + SIGINT, as shells have it."""


class Interrupts:
    """Counts Ctrl-C in place of being ended by it. After the `spared` ones the next is for `then`.

    With `endings` it notes the other signals that would end the program too, and which was the last.
    """

    def __init__(self, spared: int = 3, then: Any = signal.SIG_DFL, *, endings: bool = False) -> None:
        """None yet."""
        self.count = 0
        self.ending = 0
        """Number of the signal that was to end the program; 0: none has come."""
        self._spared, self._then = spared, then
        self._numbers = (signal.SIGINT, *((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if endings else ()))
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in self._numbers:
            before = signal.getsignal(number)
            # In the background of a shell script Ctrl-C is for others, and so is a closed terminal behind nohup.
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._count if number == signal.SIGINT else self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def wants_out(self) -> bool:
        """Whether anybody wants the program to end."""
        return self.count > 0 or self.ending > 0

    def _count(self, *_: object) -> None:
        # Nothing else: a handler runs between two steps of whatever the main thread does.
        self.count += 1
        if self.count >= self._spared:
            signal.signal(signal.SIGINT, self._then)

    def _end(self, number: int, _: object) -> None:
        self.ending = number
