"""Which values a search tries for a key, for any engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_MICRO_BATCH_SIZE = 32
"""Sequences. Larger micro-batches are searched only if pinned, because they only enlarge the pipeline bubble."""


def divisors(number: int, limit: int) -> list[int]:
    """Return the divisors of a number up to a limit, ascending."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def chosen(pin: Mapping[str, Any], key: str, values: list[Any]) -> list[Any]:
    """Return the values to try for a key: its pin if it has one, else `values`."""
    return [pin[key]] if key in pin else values
