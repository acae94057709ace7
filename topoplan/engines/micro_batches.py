"""What a search tries of a key, whichever engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_MICRO_BATCH_SIZE = 32
"""Sequences; a larger micro batch only makes the pipeline's bubble larger. Not searched unless pinned."""


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of a number, up to a limit."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def chosen(pin: Mapping[str, Any], key: str, values: list[Any]) -> list[Any]:
    """Values to try for a key, or its pin where there is one."""
    return [pin[key]] if key in pin else values
