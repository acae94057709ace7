"""How many examples a property or a table is tried on: all of them in CI, fewer where somebody waits."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

_USUAL = 100

Row = TypeVar("Row")


def examples(number: int) -> int:
    """`number` in CI, elsewhere the share of it that the profile in conftest.py has of hypothesis' usual number."""
    return max(1, number * settings.default.max_examples // _USUAL)


def some(rows: Sequence[Row], few: int) -> Sequence[Row]:
    """All rows in CI, elsewhere a few from the first to the last: of a table whose rows mostly go the same way."""
    if settings.default.max_examples >= _USUAL or len(rows) <= few:
        return rows
    return [rows[place * (len(rows) - 1) // (few - 1)] for place in range(few)]
