"""Which micro batches are searched."""

from __future__ import annotations

MAX_MICRO_BATCH_SIZE = 32
"""Sequences; a larger micro batch only makes the pipeline's bubble larger. Not searched unless pinned."""


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of a number, up to a limit."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]
