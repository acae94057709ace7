"""Nothing waits without an end: deadlines, and calls that have no time limit of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class Overtime(Exception):  # noqa: N818  not an error by itself; the caller knows what it means
    """A time limit has passed."""


@dataclass(slots=True)
class Deadline:
    """A moment in the future, on the clock that nobody sets."""

    total_s: float
    at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.at_s = time.monotonic() + self.total_s

    @property
    def left_s(self) -> float:
        """Seconds until then, never below 0."""
        return max(0.0, self.at_s - time.monotonic())

    def extend(self, by_s: float) -> None:
        """Move it: a person was asked meanwhile."""
        self.at_s += by_s


class _Outcome(Generic[T]):
    value: T
    error: BaseException | None = None


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of a call that cannot be told a time limit, such as a name lookup.

    After the limit its thread is left alone; it does not keep the program from ending.

    Raises:
        Overtime: the limit has passed.
    """
    outcome: _Outcome[T] = _Outcome()

    def run() -> None:
        try:
            outcome.value = call()
        except BaseException as error:
            outcome.error = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise Overtime
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
