import threading
import time

import pytest

from tests.waiting import LIMIT_S
from topoplan.remote.waiting import Deadline, TimedOut, within


def test_a_deadline_counts_down_and_stops_at_zero() -> None:
    deadline = Deadline(60)
    assert 0 < deadline.left_s <= 60
    deadline.extend(-100)
    assert deadline.left_s == 0


def test_a_call_gives_its_result_or_its_error() -> None:
    assert within(LIMIT_S, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(LIMIT_S, lambda: {}["x"])


def test_a_call_that_does_not_end_is_left() -> None:
    hold = threading.Event()
    started = time.monotonic()
    with pytest.raises(TimedOut):
        within(0.05, hold.wait)
    assert time.monotonic() - started < LIMIT_S
    hold.set()
