"""Handle Ctrl-C while hosts work, or while a search runs."""

from __future__ import annotations

import signal
from typing import Any


class Interrupts:
    """Counts Ctrl-C instead of exiting. After `spared` of them, SIGINT is handled by `then`. With `endings`, the other
    terminating signals are recorded too, keeping the last one."""

    def __init__(self, spared: int = 3, then: Any = signal.SIG_DFL, *, endings: bool = False) -> None:
        self.count = 0
        self.ending = 0
        """Number of the last terminating signal, or 0."""
        self._spared, self._then = spared, then
        self._numbers = (signal.SIGINT, *((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if endings else ()))
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in self._numbers:
            before = signal.getsignal(number)
            # A signal that is ignored stays so: Ctrl-C for a shell's background job, or a closed terminal under nohup.
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._count if number == signal.SIGINT else self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def wants_out(self) -> bool:
        """Whether any signal asked the program to end."""
        return self.count > 0 or self.ending > 0

    def _count(self, *_: object) -> None:
        # Nothing else: a handler may run between any two instructions of the main thread.
        self.count += 1
        if self.count >= self._spared:
            signal.signal(signal.SIGINT, self._then)

    def _end(self, number: int, _: object) -> None:
        self.ending = number
