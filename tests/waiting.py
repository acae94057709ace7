"""Wait for a condition, with a limit that a correct program never reaches, however busy the machine is."""

import time
from collections.abc import Callable

LIMIT_S = 120.0
"""Limit for what takes a second or a few on an idle machine."""


def eventually(condition: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def wait_until(condition: Callable[[], object], what: str) -> None:
    assert eventually(condition), f"never: {what}"
