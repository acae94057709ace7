"""The number of examples for properties and tables: all in CI, fewer on a developer's machine."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

_USUAL = 100

Row = TypeVar("Row")


def examples(number: int) -> int:
    """Return `number` in CI, and elsewhere the share of it that the profile in conftest.py allows."""
    return max(1, number * settings.default.max_examples // _USUAL)


def some(rows: Sequence[Row], few: int) -> Sequence[Row]:
    """Return all rows in CI, and elsewhere a few spread over a table whose rows mostly test the same code."""
    if settings.default.max_examples >= _USUAL or len(rows) <= few:
        return rows
    return [rows[place * (len(rows) - 1) // (few - 1)] for place in range(few)]
