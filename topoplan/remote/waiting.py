"""Deadlines, and calls with a time limit for functions that have none, so that no wait is unlimited."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

INTERRUPT_LOOK_S = 0.05


class TimedOut(Exception):  # noqa: N818  not an error by itself; the caller knows what it means
    """A time limit has passed."""


@dataclass(slots=True)
class Deadline:
    """A moment in the future, on the monotonic clock."""

    total_s: float
    at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.at_s = time.monotonic() + self.total_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never below 0."""
        return max(0.0, self.at_s - time.monotonic())

    def extend(self, by_s: float) -> None:
        """Move the deadline, because the user was asked meanwhile."""
        self.at_s += by_s


class Call(Generic[T]):
    """A call in a thread that does not keep the program from ending, so that the caller can do other things."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._value: list[T] = []
        self._error: list[BaseException] = []
        self.done = threading.Event()

        def run() -> None:
            try:
                self._value.append(job())
            except BaseException as error:
                self._error.append(error)
            finally:
                self.done.set()

        threading.Thread(target=run, daemon=True).start()

    def result(self) -> T:
        """Return the result of a call that is done. Raises what the call raised."""
        if self._error:
            raise self._error[0]
        return self._value[0]


def within(limit_s: float, job: Callable[[], T]) -> T:
    """Return the result of a call that accepts no time limit, such as a name lookup.

    After the limit its thread is abandoned. Raises TimedOut.
    """
    call = Call(job)
    if not call.done.wait(limit_s):
        raise TimedOut
    return call.result()
